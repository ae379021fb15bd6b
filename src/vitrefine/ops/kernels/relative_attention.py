"""Relative attention as one differentiable operator that never holds the (H, N, N) bias.

What a kernel reads are strips: for each displacement of rows, the (w, w) biases of pairs of columns, 2/h of the full
bias and contiguous along keys, so that several are read at a time. The log-sum-exp of each row is all that is kept.

The gradient of the table sums the scores' gradients over all pairs of one displacement. `grad_table_kernel` gives a
program one head, one displacement of rows and a tile of columns: every pair of rows so far apart adds to the same
tile, and for them all the tile of biases is the same. `fold_kernel` then adds the diagonals. On small maps, where rows
are shorter than a tile and images many, `grad_pairs_kernel` sums over images first, for tiles of all N² pairs, and
`fold_pairs_kernel` adds up the pairs of a displacement. No sum is left to atomics: same inputs, same bits.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.precision import product_precision

LOG2_E = 1.4426950408889634
MAX_DIM = 128
MOST_PAIRS = 640**2  # tokens, squared, up to which the gradients of all pairs of a head are held at once
PROGRAMS = 8 * 132  # that share the sum over images then: eight for each multiprocessor of an H200


@triton.jit
def load_rows(base, rows, stride, n_rows, dim, DIM: tl.constexpr):
    channels = tl.arange(0, DIM)
    mask = (rows >= 0)[:, None] & (rows < n_rows)[:, None] & (channels < dim)[None, :]
    return tl.load(base + rows[:, None] * stride + channels[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, values, rows, stride, n_rows, dim, DIM: tl.constexpr):
    channels = tl.arange(0, DIM)
    mask = (rows < n_rows)[:, None] & (channels < dim)[None, :]
    tl.store(base + rows[:, None] * stride + channels[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def cut(tokens, width, height):
    """Row and column of tokens; one past the last is given the last row, so that no address leaves the strips."""
    # Integers are divided slowly. Half a token away from the nearest whole quotient, a float is exact to 2^21 tokens.
    row = ((tokens.to(tl.float32) + 0.5) * (1.0 / width)).to(tl.int32)
    return tl.minimum(row, height - 1), tokens - row * width


@triton.jit
def query_place(tokens, width, height, RUN: tl.constexpr):
    row, column = cut(tokens, width, height)
    return tl.multiple_of(((row + height - 1) * width + width - 1 - column) * width, RUN)


@triton.jit
def key_place(tokens, width, height, RUN: tl.constexpr):
    row, column = cut(tokens, width, height)
    return tl.max_contiguous(tl.multiple_of(column - row * width * width, RUN), RUN)


@triton.jit
def attend_kernel(
    q, k, v, strips, out, lse, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head, v_token, out_image,
    out_head, out_token, n_heads, n_tokens, width, dim, scale, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log2-sum-exp of ROWS queries of one head; scores are in units of log 2 throughout."""
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    height = n_tokens // width
    strips += tl.multiple_of(head * (2 * height - 1) * width * width, RUN)
    query_bias = strips + query_place(rows, width, height, RUN)
    queries = load_rows(q + image * q_image + head * q_head, rows, q_token, n_tokens, dim, DIM)
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    read = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, n_tokens, KEYS):
        columns = start + tl.arange(0, KEYS)
        keys = load_rows(k, columns, k_token, n_tokens, dim, DIM)
        bias = tl.load(query_bias[:, None] + key_place(columns, width, height, RUN)[None, :])
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + bias.to(tl.float32)
        scores = tl.where((columns < n_tokens)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        maps = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(maps, 1)
        values = load_rows(v, columns, v_token, n_tokens, dim, DIM)
        read = tl.dot(maps.to(values.dtype), values, read * shrink[:, None], input_precision=PRECISION)
        top = higher
    store_rows(
        out + image * out_image + head * out_head, read / total[:, None], rows, out_token, n_tokens, dim, DIM
    )  # fmt: skip
    tl.store(lse + tl.program_id(1).to(tl.int64) * n_tokens + rows, top + tl.log2(total), mask=rows < n_tokens)


@triton.jit
def grad_queries_kernel(
    q, k, v, strips, out, grad, lse, delta, grad_q, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head,
    v_token, out_image, out_head, out_token, grad_image, grad_head, grad_token, n_heads, n_tokens, width, dim, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of ROWS queries, and δ(i) = dO(i)·O(i), which the other kernels read."""
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    height = n_tokens // width
    strips += tl.multiple_of(head * (2 * height - 1) * width * width, RUN)
    query_bias = strips + query_place(rows, width, height, RUN)
    queries = load_rows(q + image * q_image + head * q_head, rows, q_token, n_tokens, dim, DIM)
    grads = load_rows(grad + image * grad_image + head * grad_head, rows, grad_token, n_tokens, dim, DIM)
    outs = load_rows(out + image * out_image + head * out_head, rows, out_token, n_tokens, dim, DIM)
    row_delta = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    at = tl.program_id(1).to(tl.int64) * n_tokens + rows
    tl.store(delta + at, row_delta, mask=rows < n_tokens)
    norm = tl.load(lse + at, mask=rows < n_tokens, other=float("inf"))
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    total = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, n_tokens, KEYS):
        columns = start + tl.arange(0, KEYS)
        keys = load_rows(k, columns, k_token, n_tokens, dim, DIM)
        values = load_rows(v, columns, v_token, n_tokens, dim, DIM)
        bias = tl.load(query_bias[:, None] + key_place(columns, width, height, RUN)[None, :])
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + bias.to(tl.float32)
        maps = tl.exp2(scores - norm[:, None])
        steep = maps * (tl.dot(grads, tl.trans(values), input_precision=PRECISION) - row_delta[:, None])
        total = tl.dot(steep.to(keys.dtype), keys, total, input_precision=PRECISION)  # keys past the last are zero
    total *= scale * 0.6931471805599453
    store_rows(grad_q + tl.program_id(1).to(tl.int64) * n_tokens * dim, total, rows, dim, n_tokens, dim, DIM)


@triton.jit
def grad_keys_kernel(
    q, k, v, strips, grad, lse, delta, grad_k, grad_v, q_image, q_head, q_token, k_image, k_head, k_token, v_image,
    v_head, v_token, grad_image, grad_head, grad_token, n_heads, n_tokens, width, dim, scale, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of KEYS keys and values; maps are held transposed, keys first."""
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    height = n_tokens // width
    strips += tl.multiple_of(head * (2 * height - 1) * width * width, RUN)
    key_bias = strips + key_place(columns, width, height, RUN)
    keys = load_rows(k + image * k_image + head * k_head, columns, k_token, n_tokens, dim, DIM)
    values = load_rows(v + image * v_image + head * v_head, columns, v_token, n_tokens, dim, DIM)
    q += image * q_image + head * q_head
    grad += image * grad_image + head * grad_head
    lse += tl.program_id(1).to(tl.int64) * n_tokens
    delta += tl.program_id(1).to(tl.int64) * n_tokens
    total_k = tl.zeros((KEYS, DIM), tl.float32)
    total_v = tl.zeros((KEYS, DIM), tl.float32)
    for start in range(0, n_tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        queries = load_rows(q, rows, q_token, n_tokens, dim, DIM)
        grads = load_rows(grad, rows, grad_token, n_tokens, dim, DIM)
        norm = tl.load(lse + rows, mask=rows < n_tokens, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=rows < n_tokens, other=0.0)
        bias = tl.load(key_bias[:, None] + query_place(rows, width, height, RUN)[None, :])
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale + bias.to(tl.float32)
        maps = tl.exp2(scores - norm[None, :])
        total_v = tl.dot(maps.to(grads.dtype), grads, total_v, input_precision=PRECISION)
        steep = maps * (tl.dot(values, tl.trans(grads), input_precision=PRECISION) - row_delta[None, :])
        total_k = tl.dot(steep.to(queries.dtype), queries, total_k, input_precision=PRECISION)
    total_k *= scale * 0.6931471805599453
    at = tl.program_id(1).to(tl.int64) * n_tokens * dim
    store_rows(grad_k + at, total_k, columns, dim, n_tokens, dim, DIM)
    store_rows(grad_v + at, total_v, columns, dim, n_tokens, dim, DIM)


@triton.jit
def grad_table_kernel(
    q, k, v, strips, grad, lse, delta, partial, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head,
    v_token, grad_image, grad_head, grad_token, n_images, n_heads, n_tokens, width, dim, scale, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over images and pairs of rows `apart` from each other of the scores' gradients, a tile of columns."""
    height = n_tokens // width
    apart = tl.program_id(1) % (2 * height - 1) - (height - 1)
    head = tl.program_id(1) // (2 * height - 1)
    blocks = tl.cdiv(width, KEYS)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % blocks) * KEYS + tl.arange(0, KEYS)
    pairs = (rows < width)[:, None] & (columns < width)[None, :]
    strips += tl.program_id(1) * width * width
    bias = tl.load(strips + (width - 1 - rows)[:, None] * width + columns[None, :], mask=pairs, other=0.0)
    first = tl.maximum(apart, 0)
    count = height - tl.abs(apart)
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for step in range(n_images * count):
        image = (step // count).to(tl.int64)
        row = first + step % count
        from_row = row * width + rows
        from_column = (row - apart) * width + columns
        at = (image * n_heads + head) * n_tokens + from_row
        norm = tl.load(lse + at, mask=rows < width, other=float("inf"))
        row_delta = tl.load(delta + at, mask=rows < width, other=0.0)
        queries = load_rows(q + image * q_image + head * q_head, from_row, q_token, n_tokens, dim, DIM)
        keys = load_rows(k + image * k_image + head * k_head, from_column, k_token, n_tokens, dim, DIM)
        grads = load_rows(grad + image * grad_image + head * grad_head, from_row, grad_token, n_tokens, dim, DIM)
        values = load_rows(v + image * v_image + head * v_head, from_column, v_token, n_tokens, dim, DIM)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + bias.to(tl.float32)
        maps = tl.exp2(scores - norm[:, None])
        total += maps * (tl.dot(grads, tl.trans(values), input_precision=PRECISION) - row_delta[:, None])
    partial += tl.program_id(1).to(tl.int64) * width * width
    tl.store(partial + rows[:, None] * width + columns[None, :], total, mask=pairs)


@triton.jit
def grad_pairs_kernel(
    q, k, v, strips, grad, lse, delta, partial, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head,
    v_token, grad_image, grad_head, grad_token, n_images, n_heads, n_tokens, width, dim, scale, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over a share of the images of the scores' gradients of a tile of one head's pairs."""
    height = n_tokens // width
    head = tl.program_id(1)
    blocks = tl.cdiv(n_tokens, KEYS)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % blocks) * KEYS + tl.arange(0, KEYS)
    strips += tl.multiple_of(head * (2 * height - 1) * width * width, RUN)
    query_bias = strips + query_place(rows, width, height, RUN)
    bias = tl.load(query_bias[:, None] + key_place(columns, width, height, RUN)[None, :]).to(tl.float32)
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for step in range(tl.cdiv(n_images - tl.program_id(2), tl.num_programs(2))):
        image = (tl.program_id(2) + step * tl.num_programs(2)).to(tl.int64)
        at = (image * n_heads + head) * n_tokens + rows
        norm = tl.load(lse + at, mask=rows < n_tokens, other=float("inf"))
        row_delta = tl.load(delta + at, mask=rows < n_tokens, other=0.0)
        queries = load_rows(q + image * q_image + head * q_head, rows, q_token, n_tokens, dim, DIM)
        keys = load_rows(k + image * k_image + head * k_head, columns, k_token, n_tokens, dim, DIM)
        grads = load_rows(grad + image * grad_image + head * grad_head, rows, grad_token, n_tokens, dim, DIM)
        values = load_rows(v + image * v_image + head * v_head, columns, v_token, n_tokens, dim, DIM)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + bias
        maps = tl.exp2(scores - norm[:, None])
        total += maps * (tl.dot(grads, tl.trans(values), input_precision=PRECISION) - row_delta[:, None])
    partial += (tl.program_id(2).to(tl.int64) * n_heads + head) * n_tokens * n_tokens
    pairs = (rows < n_tokens)[:, None] & (columns < n_tokens)[None, :]
    tl.store(partial + rows[:, None] * n_tokens + columns[None, :], total, mask=pairs)


@triton.jit
def fold_pairs_kernel(pairs, grad_table, n_tokens, width, COLUMNS: tl.constexpr, RIGHT: tl.constexpr):
    """One head and displacement of rows: the gradient of each displacement of columns, out of those of all pairs."""
    height = n_tokens // width
    apart = tl.program_id(0) % (2 * height - 1) - (height - 1)
    head = tl.program_id(0) // (2 * height - 1)
    pairs += head.to(tl.int64) * n_tokens * n_tokens
    column = tl.arange(0, COLUMNS)[:, None]
    right = tl.arange(0, RIGHT)[None, :]
    key_column = column - (right - (width - 1))
    exists = (column < width) & (key_column >= 0) & (key_column < width)
    total = tl.zeros((COLUMNS, RIGHT), tl.float32)
    first = tl.maximum(apart, 0)
    for row in range(first, first + height - tl.abs(apart)):
        place = (row * width + column) * n_tokens + (row - apart) * width + key_column
        total += tl.load(pairs + place, mask=exists, other=0.0)
    right = tl.arange(0, RIGHT)
    at = grad_table + tl.program_id(0).to(tl.int64) * (2 * width - 1) + right
    tl.store(at, tl.sum(total, 0).to(grad_table.dtype.element_ty), mask=right < 2 * width - 1)


@triton.jit
def fold_kernel(partial, grad_table, width, RIGHT: tl.constexpr):
    """Add the diagonals of a (width, width) tile: pairs of columns that lie equally far apart."""
    right = tl.program_id(0) * RIGHT + tl.arange(0, RIGHT)
    partial += tl.program_id(1).to(tl.int64) * width * width
    total = tl.zeros((RIGHT,), tl.float32)
    for row in range(width):
        column = row - (right - (width - 1))
        total += tl.load(partial + row * width + column, mask=(column >= 0) & (column < width), other=0.0)
    mask = right < 2 * width - 1
    at = grad_table + tl.program_id(1).to(tl.int64) * (2 * width - 1) + right
    tl.store(at, total.to(grad_table.dtype.element_ty), mask=mask)


def _tile(kernel: str, dim: int, dtype: torch.dtype) -> dict[str, int]:
    if kernel == "grad_table":
        rows, keys, stages = 32, 32, 1 if dtype == torch.float32 and dim > 64 else 3
    elif dtype == torch.float32 or dim > 64:
        rows, keys, stages = (32, 64, 2) if kernel == "grad_keys" else (64, 32, 2)
    else:
        rows, keys, stages = 64, 64, (2 if kernel == "grad_keys" else 3)
    return {"ROWS": rows, "KEYS": keys, "num_warps": 2 if kernel == "grad_table" else 4, "num_stages": stages}


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strips(table: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(H, 2h-1, w, w): for each displacement of rows, the biases of columns of queries, last first, and of keys."""
    return (table.flip(-1).float() * LOG2_E).to(dtype).unfold(-1, width, 1).contiguous()


def _constants(dim: int, width: int, dtype: torch.dtype) -> dict[str, int | str]:
    return {
        "DIM": max(16, triton.next_power_of_2(dim)),
        "RUN": math.gcd(width, 8),  # so many biases at a time are read as one, where a run of keys shares a row
        "PRECISION": product_precision(dtype),
    }


@torch.library.custom_op("vitrefine::relative_attention", mutates_args=())
@on_its_device
def _forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, d), laid out as (B, N, H, d), and log2-sum-exp (B, H, N)."""
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, heads, n_tokens, dim = q.shape
    out = q.new_empty((batch, n_tokens, heads, dim)).transpose(1, 2)
    lse = q.new_empty((batch, heads, n_tokens), dtype=torch.float32)
    tile, constants = _tile("attend", dim, q.dtype), _constants(dim, width, q.dtype)
    launch = Launcher("relative_attention", [q, k, v, table], width, constants["PRECISION"])
    launch(
        attend_kernel,
        (triton.cdiv(n_tokens, tile["ROWS"]), batch * heads, 1),
        q,
        k,
        v,
        _strips(table, width, q.dtype),
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        heads,
        n_tokens,
        width,
        dim,
        scale * LOG2_E,
        **constants,
        **tile,
    )
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, n_tokens, dim = q.shape
    out = q.new_empty((batch, n_tokens, heads, dim)).transpose(1, 2)
    return out, q.new_empty((batch, heads, n_tokens), dtype=torch.float32)


@torch.library.custom_op("vitrefine::relative_attention_backward", mutates_args=())
@on_its_device
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    width: int,
    scale: float,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the table (empty unless `table_grad`)."""
    grad, q, k, v = _rows_contiguous(grad), _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, heads, n_tokens, dim = q.shape
    strips = _strips(table, width, q.dtype)
    delta = torch.empty_like(lse)
    grad_q, grad_k, grad_v = (q.new_empty(q.shape) for _ in range(3))
    common = _constants(dim, width, q.dtype)
    launch = Launcher("relative_attention_backward", [grad, q, k, v, table, out], width, common["PRECISION"])
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = (heads, n_tokens, width, dim, scale * LOG2_E)

    tile = _tile("grad_queries", dim, q.dtype)
    launch(
        grad_queries_kernel,
        (triton.cdiv(n_tokens, tile["ROWS"]), batch * heads, 1),
        q,
        k,
        v,
        strips,
        out,
        grad,
        lse,
        delta,
        grad_q,
        *inputs,
        *out.stride()[:3],
        *grad.stride()[:3],
        *sizes,
        **common,
        **tile,
    )
    tile = _tile("grad_keys", dim, q.dtype)
    over_keys = (triton.cdiv(n_tokens, tile["KEYS"]), batch * heads, 1)
    launch(
        grad_keys_kernel,
        over_keys,
        q,
        k,
        v,
        strips,
        grad,
        lse,
        delta,
        grad_k,
        grad_v,
        *inputs,
        *grad.stride()[:3],
        *sizes,
        **common,
        **tile,
    )
    if not table_grad:
        return grad_q, grad_k, grad_v, table.new_empty((0,))
    grad_table = table.new_empty(table.shape)
    displacements = heads * table.shape[1]
    if n_tokens**2 <= MOST_PAIRS and width <= 32:
        tile = _tile("grad_pairs", dim, q.dtype)
        tiles = triton.cdiv(n_tokens, tile["ROWS"]) * triton.cdiv(n_tokens, tile["KEYS"])
        shares = min(batch, triton.cdiv(PROGRAMS, tiles * heads))
        pairs = q.new_empty((shares, heads, n_tokens, n_tokens), dtype=torch.float32)
        launch(
            grad_pairs_kernel,
            (tiles, heads, shares),
            q,
            k,
            v,
            strips,
            grad,
            lse,
            delta,
            pairs,
            *inputs,
            *grad.stride()[:3],
            batch,
            *sizes,
            **common,
            **tile,
        )
        sides = {"COLUMNS": triton.next_power_of_2(width), "RIGHT": triton.next_power_of_2(2 * width - 1)}
        launch(fold_pairs_kernel, (displacements, 1, 1), pairs.sum(0), grad_table, n_tokens, width, **sides)
        return grad_q, grad_k, grad_v, grad_table
    partial = q.new_empty((displacements, width, width), dtype=torch.float32)
    tile = _tile("grad_table", dim, q.dtype)
    tiles = triton.cdiv(width, tile["ROWS"]) * triton.cdiv(width, tile["KEYS"])
    launch(
        grad_table_kernel,
        (tiles, displacements, 1),
        q,
        k,
        v,
        strips,
        grad,
        lse,
        delta,
        partial,
        *inputs,
        *grad.stride()[:3],
        batch,
        *sizes,
        **common,
        **tile,
    )
    over_columns = (triton.cdiv(2 * width - 1, 64), displacements, 1)
    launch(fold_kernel, over_columns, partial, grad_table, width, RIGHT=64, num_warps=2)
    return grad_q, grad_k, grad_v, grad_table


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    width: int,
    scale: float,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (q.new_empty(q.shape) for _ in range(3))
    return grad_q, grad_k, grad_v, table.new_empty(table.shape if table_grad else (0,))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, strips, ctx.width, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, strips, *output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 6
    table_grad = bool(ctx.needs_input_grad[3])
    *grads, grad_table = _backward(grad, *ctx.saved_tensors, ctx.width, ctx.scale, table_grad)
    return *grads, grad_table if table_grad else None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def relative_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int, *, scale: float | None = None
) -> Tensor:
    """`relative_attention` without the (H, N, N) bias.

    Args:
        q: Queries, (B, H, N, d), d at most 128; half or single precision.
        k: Keys, (B, H, N, d).
        v: Values, (B, H, N, d).
        table: Bias of each head and displacement, (H, 2h-1, 2w-1), in any type.
        width: Of the map.
        scale: Factor of the scores; d^-½ if None.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if q.dtype not in kinds or q.shape[-1] > MAX_DIM:
        raise UserError(
            f"the relative attention kernel takes heads of at most {MAX_DIM} channels in half or single precision, "
            f"not {q.shape[-1]} in {q.dtype}; use impl='reference'"
        )
    return _forward(q, k, v, table, width, q.shape[-1] ** -0.5 if scale is None else scale)[0]
