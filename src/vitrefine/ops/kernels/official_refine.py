"""The authors' refinement in one kernel: the H' maps of a tile of pixels live in registers.

The 3×3 convolution reads the expanded maps of nine neighbours. They are expanded again for each of the nine, which
costs nine small products a tile and saves every exchange between threads.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.aligned_maps import empty_maps
from vitrefine.ops.choice import HALF, computes_in
from vitrefine.ops.kernels.launch import on_its_device
from vitrefine.ops.kernels.shapes import cdiv, padded, rows_contiguous

if TYPE_CHECKING:
    from vitrefine.ops.official_refine import OfficialMix

TILE = 2, 32, 4  # rows, columns and warps of a program


@triton.jit
def load_pixels(maps, stride_head, stride_row, heads, row, column, n_heads, inside):
    """[heads, pixels] of one image; zero outside."""
    place = heads[:, None] * stride_head + (row * stride_row + column)[None, :]
    return tl.load(maps + place, mask=(heads < n_heads)[:, None] & inside[None, :], other=0.0)


@triton.jit
def refine_kernel(
    maps, expand, expand_bias, local, local_bias, reduce, reduce_bias, residual, out, maps_image, maps_head, maps_row,
    out_image, out_head, out_row, n_heads, n_rows, n_columns, EXPAND: tl.constexpr, HEADS: tl.constexpr,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS × COLUMNS pixels of one image, all heads. Weights come padded to HEADS and HIDDEN."""
    image = tl.program_id(1).to(tl.int64)
    maps += image * maps_image
    heads = tl.arange(0, HEADS)
    hidden = tl.arange(0, HIDDEN)
    pixel = tl.arange(0, ROWS * COLUMNS)
    blocks = tl.cdiv(n_columns, COLUMNS)
    row = (tl.program_id(0) // blocks) * ROWS + pixel // COLUMNS
    column = (tl.program_id(0) % blocks) * COLUMNS + pixel % COLUMNS
    kind = expand.dtype.element_ty
    weight = tl.load(expand + hidden[:, None] * HEADS + heads[None, :])
    bias = tl.load(expand_bias + hidden)
    total = tl.zeros((HIDDEN, ROWS * COLUMNS), tl.float32) + tl.load(local_bias + hidden)[:, None]
    for tap in range(9):  # not unrolled: the nine loads would all be in flight at once, and fill the registers
        near_row = row + tap // 3 - 1
        near_column = column + tap % 3 - 1
        inside = (near_row >= 0) & (near_row < n_rows) & (near_column >= 0) & (near_column < n_columns)
        near = load_pixels(maps, maps_head, maps_row, heads, near_row, near_column, n_heads, inside)
        wide = tl.dot(weight, near.to(kind), input_precision=PRECISION)
        if EXPAND:
            wide = tl.minimum(tl.maximum(wide + bias[:, None], 0.0), 6.0)
            wide = tl.where(inside[None, :], wide, 0.0)
        total += tl.load(local + tap * HIDDEN + hidden)[:, None] * wide
    total = tl.minimum(tl.maximum(total, 0.0), 6.0)
    weight = tl.load(reduce + heads[:, None] * HIDDEN + hidden[None, :])
    result = tl.dot(weight, total.to(kind), input_precision=PRECISION) + tl.load(reduce_bias + heads)[:, None]
    inside = (row < n_rows) & (column < n_columns)
    own = load_pixels(maps, maps_head, maps_row, heads, row, column, n_heads, inside)
    result += tl.load(residual + heads)[:, None] * own.to(tl.float32)
    place = heads[:, None] * out_head + (row * out_row + column)[None, :]
    exists = (heads < n_heads)[:, None] & inside[None, :]
    tl.store(out + image * out_image + place, result.to(out.dtype.element_ty), mask=exists)


@torch.library.custom_op("vitrefine::official_refine", mutates_args=())
@on_its_device
def _refine(
    maps: Tensor,
    expand: Tensor | None,
    expand_bias: Tensor | None,
    local: Tensor,
    local_bias: Tensor,
    reduce: Tensor,
    reduce_bias: Tensor,
    residual: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    maps = rows_contiguous(maps)
    batch, n_heads, n_rows, n_columns = maps.shape
    n_hidden = local.shape[0]
    heads, hidden = padded(n_heads), padded(n_hidden)

    def fill(shape: tuple[int, ...], values: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
        filled = values.new_zeros(shape, dtype=kind)
        filled[tuple(slice(n) for n in values.shape)] = values
        return filled

    if expand is None or expand_bias is None:
        expand, expand_bias = torch.eye(n_hidden, device=maps.device), local_bias
        given = False
    else:
        given = True
    out = empty_maps(maps.new_empty(0, dtype=dtype), *maps.shape)
    rows, columns, warps = TILE
    refine_kernel[(cdiv(n_rows, rows) * cdiv(n_columns, columns), batch)](
        maps,
        fill((hidden, heads), expand, dtype),
        fill((hidden,), expand_bias),
        fill((9, hidden), local.flatten(1).T),
        fill((hidden,), local_bias),
        fill((heads, hidden), reduce, dtype),
        fill((heads,), reduce_bias),
        fill((heads,), residual),
        out,
        *maps.stride()[:3],
        *out.stride()[:3],
        n_heads,
        n_rows,
        n_columns,
        EXPAND=given,
        HEADS=heads,
        HIDDEN=hidden,
        ROWS=rows,
        COLUMNS=columns,
        PRECISION="ieee",
        num_warps=warps,
    )
    return out


@_refine.register_fake
def _(maps: Tensor, *others: Any) -> Tensor:
    return empty_maps(maps.new_empty(0, dtype=others[-1]), *maps.shape)


def official_refine_triton(maps: Tensor, mix: "OfficialMix") -> Tensor:
    """`official_refine` in the type of autocast, or of the maps; no gradients."""
    dtype = computes_in(maps)
    return _refine(maps, *mix, dtype if dtype in HALF else maps.dtype)
