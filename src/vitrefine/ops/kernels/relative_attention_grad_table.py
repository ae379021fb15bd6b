"""Backward: the gradient of the table, the scores' gradients summed over all pairs of one displacement.

`grad_table_kernel` gives a program one head, one displacement of rows and a tile of columns: every pair of rows so far
apart adds to the same tile, and for them all the tile of biases is the same. `fold_kernel` then adds the diagonals. On
small maps, where rows are shorter than a tile and images many, `grad_pairs_kernel` sums over images first, for tiles of
all N² pairs, and `fold_pairs_kernel` adds up the pairs of a displacement. No sum is left to atomics: same inputs, same
bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.relative_attention_call import Call
from vitrefine.ops.kernels.relative_attention_tiles import head_strips, key_place, query_place, score_grads
from vitrefine.ops.kernels.rows import load_rows
from vitrefine.ops.kernels.shapes import cdiv

MOST_PAIRS = 640**2  # tokens, squared, up to which the gradients of all pairs of a head are held at once
PROGRAMS = 8 * 132  # that share the sum over images then: eight for each multiprocessor of an H200


@triton.jit
def image_grads(
    q, k, v, bias, grad, lse, delta, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head, v_token,
    grad_image, grad_head, grad_token, image, head, rows, columns, live, n_heads, n_tokens, dim, scale,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores' gradients of a tile of one image's pairs; zero in rows that are not `live`."""
    at = (image * n_heads + head) * n_tokens + rows
    norm = tl.load(lse + at, mask=live, other=float("inf"))
    row_delta = tl.load(delta + at, mask=live, other=0.0)
    queries = load_rows(q + image * q_image + head * q_head, rows, q_token, n_tokens, dim, DIM)
    keys = load_rows(k + image * k_image + head * k_head, columns, k_token, n_tokens, dim, DIM)
    grads = load_rows(grad + image * grad_image + head * grad_head, rows, grad_token, n_tokens, dim, DIM)
    values = load_rows(v + image * v_image + head * v_head, columns, v_token, n_tokens, dim, DIM)
    return score_grads(queries, keys, bias, norm, grads, values, row_delta, scale, PRECISION)


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
        total += image_grads(
            q, k, v, bias, grad, lse, delta, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head,
            v_token, grad_image, grad_head, grad_token, image, head, row * width + rows,
            (row - apart) * width + columns, rows < width, n_heads, n_tokens, dim, scale, DIM, PRECISION,
        )  # fmt: skip
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
    query_bias = head_strips(strips, head, width, height, RUN) + query_place(rows, width, height, RUN)
    bias = tl.load(query_bias[:, None] + key_place(columns, width, height, RUN)[None, :]).to(tl.float32)
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for step in range(tl.cdiv(n_images - tl.program_id(2), tl.num_programs(2))):
        image = (tl.program_id(2) + step * tl.num_programs(2)).to(tl.int64)
        total += image_grads(
            q, k, v, bias, grad, lse, delta, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head,
            v_token, grad_image, grad_head, grad_token, image, head, rows, columns, rows < n_tokens, n_heads,
            n_tokens, dim, scale, DIM, PRECISION,
        )  # fmt: skip
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


def grad_table(launch: Launcher, call: Call, table: Tensor, grad: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the table."""
    result = table.new_empty(table.shape)
    displacements, width = call.heads * table.shape[1], call.width
    by_pairs = call.n_tokens**2 <= MOST_PAIRS and width <= 32
    tile, side = (call.tile("grad_pairs"), call.n_tokens) if by_pairs else (call.tile("grad_table"), width)
    tiles = cdiv(side, tile["ROWS"]) * cdiv(side, tile["KEYS"])
    if by_pairs:
        shares = min(call.batch, cdiv(PROGRAMS, tiles * call.heads))
        kernel, grid = grad_pairs_kernel, (tiles, call.heads, shares)
        partial = call.q.new_empty((shares, call.heads, side, side), dtype=torch.float32)
    else:
        kernel, grid = grad_table_kernel, (tiles, displacements, 1)
        partial = call.q.new_empty((displacements, side, side), dtype=torch.float32)
    launch(
        kernel,
        grid,
        *(*call.inputs, grad, lse, delta, partial),
        *(*call.strides, *grad.stride()[:3]),
        *(call.batch, *call.sizes),
        **call.constants,
        **tile,
    )
    if by_pairs:
        sides = {"COLUMNS": triton.next_power_of_2(width), "RIGHT": triton.next_power_of_2(2 * width - 1)}
        launch(fold_pairs_kernel, (displacements, 1, 1), partial.sum(0), result, call.n_tokens, width, **sides)
    else:
        over_columns = (cdiv(2 * width - 1, 64), displacements, 1)
        launch(fold_kernel, over_columns, partial, result, width, RIGHT=64, num_warps=2)
    return result
