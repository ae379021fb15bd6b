"""Pieces that the refined attention kernels share.

Attention maps travel between the kernels with their heads innermost and a border of zeros: pixel (i, j) of an image is
`HEADS` contiguous values, heads padded to 16 or 32. Any shift of the map is then aligned, and the k + 1 columns that
two neighbouring outputs read are contiguous. The convolution is a matrix product over blocks of 2×2 pixels:

    [pixels / 4, (k + 1) · SPAN] · [(k + 1) · SPAN, 4 · HEADS],   SPAN = (k + 1) · HEADS, padded to a power of two

The first factor is the window that a block reads, row by row; overlapping windows are one strided view of the buffer,
(row pairs, 2, column pairs, SPAN), so the copy engine fetches them (a tensor descriptor). The second is the mix with
its taps shifted to each of the four pixels, packed once a call (`pack_mix`). For a 3×3 mix 16 pixels are read for 4
written, and under half of the products are with zeros: cheap next to what it saves in loads and synchronisation.
"""

import triton
import triton.language as tl

UNMASKED, BOOLEAN, ADDITIVE = 0, 1, 2  # kinds of mask; an additive one says "hidden" with -inf


@triton.jit
def pack_mix(
    mix,
    packed,
    first,
    step,
    n_mixed,
    n_heads,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write the (G, H, k, k) mix in three forms [(k + 1) · SPAN, 4 · HEADS]; programs share the work by rows.

    What is multiplied over keys (forward) or over queries (gradient of the values) next wants those two neighbours
    side by side, columns (row, g, column) or (column, g, row). The transposed convolution's result returns to memory,
    where the heads of a pixel are neighbours: columns (row, column, h).
    """
    target = tl.arange(0, 4 * HEADS)[None, :]
    source = tl.arange(0, HEADS)[:, None]
    across: tl.constexpr = SPAN // HEADS
    cells: tl.constexpr = (SIZE + 1) * across
    outer = target // (2 * HEADS)
    for form in tl.static_range(3):
        for item in range(first, cells, step):
            if form == 0:
                a, b = item // across - outer, item % across - target % 2
                mixed, head = target // 2 % HEADS, source
            elif form == 1:
                a, b = item // across - target % 2, item % across - outer
                mixed, head = target // 2 % HEADS, source
            else:
                a, b = SIZE - 1 - (item // across - outer), SIZE - 1 - (item % across - target // HEADS % 2)
                mixed, head = source, target % HEADS
            exists = (a >= 0) & (a < SIZE) & (b >= 0) & (b < SIZE) & (mixed < n_mixed) & (head < n_heads)
            weight = tl.load(mix + ((mixed * n_heads + head) * SIZE + a) * SIZE + b, mask=exists, other=0.0)
            cell = ((form * cells + item) * HEADS + source) * (4 * HEADS) + target
            tl.store(packed + cell, weight.to(packed.dtype.element_ty))


@triton.jit
def load_heads(
    tensor,
    stride_head,
    stride_token,
    heads,
    tokens,
    n_heads,
    n_tokens,
    dim,
    DIM: tl.constexpr,
):
    """[heads, tokens, DIM] of one image's (H, N, d) tensor, zero outside."""
    channels = tl.arange(0, DIM)[None, None, :]
    heads = heads[:, None, None]
    tokens = tokens[None, :, None]
    exists = (heads < n_heads) & (tokens >= 0) & (tokens < n_tokens) & (channels < dim)
    return tl.load(tensor + heads * stride_head + tokens * stride_token + channels, mask=exists, other=0.0)


@triton.jit
def store_heads(
    tensor,
    stride_head,
    stride_token,
    value,
    heads,
    tokens,
    n_heads,
    n_tokens,
    dim,
    DIM: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write, or add to, [heads, tokens, DIM] of one image's (H, N, d) tensor."""
    channels = tl.arange(0, DIM)[None, None, :]
    heads = heads[:, None, None]
    tokens = tokens[None, :, None]
    exists = (heads < n_heads) & (tokens < n_tokens) & (channels < dim)
    place = tensor + heads * stride_head + tokens * stride_token + channels
    if ADD:
        value += tl.load(place, mask=exists, other=0.0)
    tl.store(place, value.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def load_tile(maps, stride_head, stride_row, heads, rows, columns, n_heads, n_rows, n_columns):
    """Values of one image's (G, Nq, Nk) maps at broadcastable heads, rows and columns; zero outside."""
    exists = (heads < n_heads) & (rows >= 0) & (rows < n_rows) & (columns >= 0) & (columns < n_columns)
    return tl.load(maps + heads * stride_head + rows * stride_row + columns, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_mask(
    mask,
    stride_head,
    stride_row,
    stride_column,
    heads,
    rows,
    columns,
    n_heads,
    n_rows,
    n_columns,
    KIND: tl.constexpr,
):
    """One image's mask at broadcastable heads, rows and columns: what to add to the scores, in natural units."""
    exists = (heads < n_heads) & (rows >= 0) & (rows < n_rows) & (columns >= 0) & (columns < n_columns)
    place = mask + heads * stride_head + rows * stride_row + columns * stride_column
    if KIND == 1:
        added = tl.where(tl.load(place, mask=exists, other=0) != 0, 0.0, float("-inf"))
    else:
        added = tl.load(place, mask=exists, other=float("-inf")).to(tl.float32)
    return added


@triton.jit
def scores(
    q,
    k,
    mask,
    mask_head,
    mask_row,
    mask_column,
    heads,
    rows,
    columns,
    n_heads,
    n_rows,
    n_columns,
    scale,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores [heads, rows, columns] in units of log 2, -inf where there is no key or the mask hides it."""
    s = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision=PRECISION) * (scale * 1.4426950408889634)
    if MASK:
        s += 1.4426950408889634 * load_mask(
            mask,
            mask_head,
            mask_row,
            mask_column,
            heads[:, None, None],
            rows[None, :, None],
            columns[None, None, :],
            n_heads,
            n_rows,
            n_columns,
            MASK,
        )
    else:
        s = tl.where(((columns >= 0) & (columns < n_columns))[None, None, :], s, float("-inf"))
    return s


@triton.jit
def store_maps(
    maps,
    value,
    heads,
    rows,
    columns,
    n_rows,
    width,
    HEADS: tl.constexpr,
):
    """Write a [heads, rows, columns] tile of maps, heads innermost, to rows and columns of a bordered buffer."""
    pixels = rows[:, None] * width + columns[None, :]
    exists = (rows < n_rows)[:, None] & (columns < width)[None, :]
    tl.store(
        maps + pixels[:, :, None] * HEADS + heads[None, None, :],
        tl.permute(value.to(maps.dtype.element_ty), (1, 2, 0)),
        mask=exists[:, :, None],
    )


@triton.jit
def block_places(start_row, start_column, width, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """[blocks, 4 · HEADS]: row, column and place in the buffer of the values of a tile's 2×2 blocks."""
    block = tl.arange(0, ROWS * KEYS // 4)
    value = tl.arange(0, 4 * HEADS)[None, :]
    rows = start_row + 2 * (block // (KEYS // 2))[:, None] + value // (2 * HEADS)
    left = start_column + 2 * (block % (KEYS // 2))[:, None]
    place = (rows * width + left) * HEADS + value % (2 * HEADS)
    # The compiler cannot see through the remainder that 16 bytes always belong to one pixel.
    return rows, left + value // HEADS % 2, tl.max_contiguous(tl.multiple_of(place, (1, 8)), (1, 8))


@triton.jit
def load_window(windows, row_pair, column_pair, row, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    """One row of the windows of a tile's blocks."""
    return tl.reshape(windows.load([row_pair + row // 2, row % 2, column_pair, 0]), (BLOCKS, SPAN))


@triton.jit
def load_weight(packed, row, HEADS: tl.constexpr, SPAN: tl.constexpr):
    """The mix of one row of a window."""
    source = tl.arange(0, SPAN)[:, None]
    target = tl.arange(0, 4 * HEADS)[None, :]
    return tl.load(packed + (row * SPAN + source) * (4 * HEADS) + target)


@triton.jit
def load_weights(packed, SIZE: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr):
    """The mix of all rows of a window, where it fits the shared memory beside the rest; else nothing.

    To be called before a loop over tiles: in the loop the compiler would fetch the weights again for every tile, and
    hold several copies, wherever something is stored there too.
    """
    weights = ()
    if (SIZE + 1) * SPAN * 4 * HEADS * packed.dtype.element_ty.primitive_bitwidth <= 32768 * 8:
        for row in tl.static_range(SIZE + 1):
            weights = weights + (load_weight(packed, row, HEADS, SPAN),)  # type: ignore[assignment]  # noqa: RUF005
    return weights


@triton.jit
def convolve(
    windows,
    packed,
    weights,
    row_pair,
    column_pair,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[BLOCKS, 4 · HEADS]: the convolution at the four pixels of each block of a tile, a row of windows at a time."""
    result = tl.zeros((BLOCKS, 4 * HEADS), tl.float32)
    if len(weights) > 0:
        for row in tl.static_range(SIZE + 1):
            window = load_window(windows, row_pair, column_pair, row, SPAN, BLOCKS)
            result = tl.dot(window, weights[row], result, input_precision=PRECISION)
    else:
        for row in range(SIZE + 1):
            window = load_window(windows, row_pair, column_pair, row, SPAN, BLOCKS)
            result = tl.dot(window, load_weight(packed, row, HEADS, SPAN), result, input_precision=PRECISION)
    return result


@triton.jit
def drop(
    value,
    out_mask,
    out_mask_head,
    out_mask_row,
    out_mask_column,
    seed,
    image,
    heads,
    rows,
    columns,
    n_mixed,
    n_rows,
    n_columns,
    dropout_p,
    OUT_MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Hide masked pairs and apply dropout to refined maps (or their gradient); indices broadcast to its shape."""
    if OUT_MASK:
        hidden = load_mask(
            out_mask,
            out_mask_head,
            out_mask_row,
            out_mask_column,
            heads,
            rows,
            columns,
            n_mixed,
            n_rows,
            n_columns,
            OUT_MASK,
        )
        value = tl.where(hidden > float("-inf"), value, 0.0)
    if DROPOUT:
        # One stream of random numbers an image, so that no offset outgrows 32 bits.
        draw = tl.rand(tl.load(seed) + image, (heads * n_rows + rows) * n_columns + columns)
        value = tl.where(draw >= dropout_p, value / (1.0 - dropout_p), 0.0)
    return value
