"""Statistics of attention maps that never exist: one sweep over the keys for rows, a second one for pairs of heads.

With t(j) = s(j) − max s in units of log 2, all that a row needs is summed as the greatest score becomes known:

    entropy   log Σ e^t − Σ e^t t / Σ e^t, two terms that are not negative: nothing cancels
    squares   Σ e^2t / (Σ e^t)²
    distance  Σ e^t ‖p_i − p_j‖₁ / Σ e^t

Given the log-sum-exp of each row, the second sweep makes the maps of all heads for a tile of rows and keys, and of each
row multiplies (heads, keys) by its transpose. It does so in half precision: rounding is as often up as down, and a
cosine of N² entries hardly feels it; errors of scores it would feel, and they have none of their own. Each tile of rows
leaves a partial sum: no atomics, the same bits twice.
"""

import triton
import triton.language as tl

UNMASKED, BOOLEAN, ADDITIVE = 0, 1, 2  # kinds of mask
HIDDEN = tl.constexpr(-1e30)  # finite, so that nothing times this score is not a number
MASKED = tl.constexpr(-6e4)  # an additive mask that is below this hides: half precision has no lower number
RAISE = tl.constexpr(8.0)  # maps are 2^8 times as large inside, where half precision resolves them better
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tokens(base, tokens, stride, n_tokens, dim, DIM: tl.constexpr):
    """[tokens, DIM], zero outside."""
    channels = tl.arange(0, DIM)
    exists = (tokens < n_tokens)[:, None] & (channels < dim)[None, :]
    return tl.load(base + tokens[:, None] * stride + channels[None, :], mask=exists, other=0.0)


@triton.jit
def load_heads(base, stride_head, stride_token, heads, tokens, channels, n_heads, n_tokens, dim):
    """[heads, tokens, channels] of one image, zero outside."""
    exists = (heads < n_heads)[:, None, None] & (tokens < n_tokens)[None, :, None] & (channels < dim)[None, None, :]
    place = heads[:, None, None] * stride_head + tokens[None, :, None] * stride_token + channels[None, None, :]
    return tl.load(base + place, mask=exists, other=0.0)


@triton.jit
def hide(scores, places, exists, KIND: tl.constexpr):
    """Scores with a mask of the same shape applied, of which some entries exist."""
    if KIND == 1:
        scores = tl.where(tl.load(places, mask=exists, other=0) != 0, scores, HIDDEN)
    else:
        added = tl.load(places, mask=exists, other=float("-inf")).to(tl.float32)
        scores = tl.where(added > MASKED, scores + added * LOG2_E, HIDDEN)
    return scores


@triton.jit
def add_keys(
    sums, queries, down, across, k, mask, places, start, rows, k_token, mask_row, mask_column, n_queries, n_keys, dim,
    scale, MASK: tl.constexpr, PLACED: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of rows with a tile of keys added; only the last tile has columns that are no keys."""
    top, total, spread, squared, far = sums
    columns = start + tl.arange(0, KEYS)
    keys = load_tokens(k, columns, k_token, n_keys, dim, DIM)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    if MASK:
        exists = (rows < n_queries)[:, None] & (columns < n_keys)[None, :]
        scores = hide(scores, mask + rows[:, None] * mask_row + columns[None, :] * mask_column, exists, MASK)
    if LAST:
        scores = tl.where((columns < n_keys)[None, :], scores, HIDDEN)
    higher = tl.maximum(top, tl.max(scores, 1))
    scores -= higher[:, None]
    maps = tl.exp2(scores)
    shrink = tl.exp2(top - higher)
    spread = (spread + total * (top - higher)) * shrink + tl.sum(maps * scores, 1)
    total = total * shrink + tl.sum(maps, 1)
    squared = squared * shrink * shrink + tl.sum(maps * maps, 1)
    if PLACED:
        key_down = tl.load(places + 2 * columns, mask=columns < n_keys, other=0.0)
        key_across = tl.load(places + 2 * columns + 1, mask=columns < n_keys, other=0.0)
        placed = (key_down == key_down) & (key_across == key_across)
        apart = tl.abs(down[:, None] - key_down[None, :]) + tl.abs(across[:, None] - key_across[None, :])
        far = far * shrink + tl.sum(maps * tl.where(placed[None, :], apart, 0.0), 1)
    return higher, total, spread, squared, far


@triton.jit
def rows_kernel(
    q, k, mask, places, entropy, squares, distance, lse, q_image, q_head, q_token, k_image, k_head, k_token,
    mask_image, mask_head, mask_row, mask_column, n_heads, n_queries, n_keys, dim, scale, MASK: tl.constexpr,
    PLACED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Entropy, squares, distance and log2-sum-exp of ROWS queries of one head."""
    tiles = tl.cdiv(n_queries, ROWS)
    part = tl.program_id(0) // tiles
    image = (part // n_heads).to(tl.int64)
    head = part % n_heads
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    queries = load_tokens(q + image * q_image + head * q_head, rows, q_token, n_queries, dim, DIM)
    k += image * k_image + head * k_head
    mask += image * mask_image + head * mask_head
    down = tl.zeros((ROWS,), tl.float32)
    across = tl.zeros((ROWS,), tl.float32)
    if PLACED:
        down = tl.load(places + 2 * rows, mask=rows < n_queries, other=0.0)
        across = tl.load(places + 2 * rows + 1, mask=rows < n_queries, other=0.0)
    nothing = tl.zeros((ROWS,), tl.float32)
    sums = (tl.full((ROWS,), HIDDEN, tl.float32), nothing, nothing, nothing, nothing)
    whole = n_keys // KEYS * KEYS
    for start in range(0, whole, KEYS):
        sums = add_keys(
            sums, queries, down, across, k, mask, places, start, rows, k_token, mask_row, mask_column, n_queries,
            n_keys, dim, scale, MASK, PLACED, KEYS, DIM, False, PRECISION,
        )  # fmt: skip
    if whole < n_keys:
        sums = add_keys(
            sums, queries, down, across, k, mask, places, whole, rows, k_token, mask_row, mask_column, n_queries,
            n_keys, dim, scale, MASK, PLACED, KEYS, DIM, True, PRECISION,
        )  # fmt: skip
    top, total, spread, squared, far = sums
    seen = top > HIDDEN / 2  # a row whose every key is hidden has a map of zeros
    at = part.to(tl.int64) * n_queries + rows
    inside = rows < n_queries
    nats = LOG_2 * (tl.log2(total) - spread / total)
    tl.store(entropy + at, tl.where(seen & (nats > 0), nats, 0.0), mask=inside)  # rounding may end below zero
    tl.store(squares + at, tl.where(seen, squared / (total * total), 0.0), mask=inside)
    tl.store(lse + at, tl.where(seen, top + tl.log2(total), float("inf")), mask=inside)
    if PLACED:
        mean = tl.where(seen, far / total, 0.0)
        placed = (down == down) & (across == across)
        tl.store(distance + at, tl.where(placed, mean, float("nan")), mask=inside)


@triton.jit(do_not_specialize=["query"])
def gram_kernel(
    q, k, mask, lse, partial, row, q_image, q_head, q_token, k_image, k_head, k_token, mask_image, mask_head, mask_row,
    mask_column, n_heads, n_queries, n_keys, dim, scale, query, MASK: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[HEADS, HEADS] products of the maps of ROWS queries of one image, raised; and the maps of one query."""
    tiles = tl.cdiv(n_queries, ROWS)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    heads = tl.arange(0, HEADS)
    rows = first + tl.arange(0, ROWS)
    channels = tl.arange(0, CHUNK)
    q += image * q_image
    k += image * k_image
    exists = (heads < n_heads)[:, None] & (rows < n_queries)[None, :]
    at = (image * n_heads + heads)[:, None] * n_queries + rows[None, :]
    norm = tl.load(lse + at, mask=exists, other=float("inf")) - RAISE
    if CHUNK == DIM:
        queries = load_heads(q, q_head, q_token, heads, rows, channels, n_heads, n_queries, dim)
    gram = tl.zeros((ROWS, HEADS, HEADS), tl.float32)  # row by row, so that warps have something to share
    for start in range(0, n_keys, KEYS):
        columns = start + tl.arange(0, KEYS)
        if CHUNK == DIM:
            keys = load_heads(k, k_head, k_token, heads, columns, channels, n_heads, n_keys, dim)
            scores = tl.dot(queries, tl.permute(keys, (0, 2, 1)), input_precision=PRECISION)
        else:
            scores = tl.zeros((HEADS, ROWS, KEYS), tl.float32)
            for channel in range(0, DIM, CHUNK):
                some = channel + channels
                asked = load_heads(q, q_head, q_token, heads, rows, some, n_heads, n_queries, dim)
                keys = load_heads(k, k_head, k_token, heads, columns, some, n_heads, n_keys, dim)
                scores = tl.dot(asked, tl.permute(keys, (0, 2, 1)), scores, input_precision=PRECISION)
        scores = tl.where((columns < n_keys)[None, None, :], scores * scale, HIDDEN)
        if MASK:
            cells = rows[None, :, None] * mask_row + columns[None, None, :] * mask_column
            cells += image * mask_image + heads[:, None, None] * mask_head
            scores = hide(scores, mask + cells, exists[:, :, None] & (columns < n_keys)[None, None, :], MASK)
        maps = tl.exp2(scores - norm[:, :, None])
        by_row = tl.permute(maps.to(tl.float16), (1, 0, 2))
        gram = tl.dot(by_row, tl.permute(by_row, (0, 2, 1)), gram)
        if (query >= first) & (query < first + ROWS):
            one = tl.sum(tl.where((rows == query)[None, :, None], maps, 0.0), 1) * tl.exp2(-RAISE)
            place = (image * n_heads + heads)[:, None] * n_keys + columns[None, :]
            tl.store(row + place, one, mask=(heads < n_heads)[:, None] & (columns < n_keys)[None, :])
    out = (tl.program_id(0).to(tl.int64) * HEADS + heads)[:, None] * HEADS + heads[None, :]
    tl.store(partial + out, tl.sum(gram, 0))


@triton.jit
def cosine_kernel(partial, similarity, n_tiles, n_heads, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Cosines of one image's heads from partial products; zero where a head's maps are."""
    image = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    cells = heads[:, None] * HEADS + heads[None, :]
    gram = tl.zeros((HEADS, HEADS), tl.float32)
    for start in range(0, n_tiles, TILES):
        tiles = start + tl.arange(0, TILES)
        place = (image * n_tiles + tiles)[:, None, None] * HEADS * HEADS + cells[None, :, :]
        gram += tl.sum(tl.load(partial + place, mask=(tiles < n_tiles)[:, None, None], other=0.0), 0)
    own = tl.where(heads[:, None] == heads[None, :], gram, 0.0)
    norms = tl.sqrt(tl.sum(own, 1))[:, None] * tl.sqrt(tl.sum(own, 0))[None, :]
    cosines = tl.where(norms > 0, gram / tl.where(norms > 0, norms, 1.0), 0.0)
    place = (image * n_heads + heads)[:, None] * n_heads + heads[None, :]
    tl.store(similarity + place, cosines, mask=(heads < n_heads)[:, None] & (heads < n_heads)[None, :])
