"""Backward, between reduction and convolution: the gradient of what was convolved, and the sums that its norm wants.

Twice for each band: the first time the sums over all pixels are not known yet.
"""

import triton
import triton.language as tl

from vitrefine.ops.kernels.official_refine_tiles import (
    GROUP,
    UNSPECIALISED,
    convolve,
    load_near,
    locate,
    relu6,
    scratch_places,
)


@triton.jit
def through_relu6(
    wide, slope, norm, local, reduce, row, column, origin, channels, exists, n_rows, n_columns, HEADS: tl.constexpr,
    STORED: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ẑ₂, y₂ = relu6(γ ẑ₂ + β), the gradient of γ ẑ₂ + β, and that of z₃, of one group.

    `norm` has rows: shift that ends normalising, γ, β. The weights of the convolution normalise already.
    """
    heads = tl.arange(0, HEADS)
    z = convolve(wide, local, row, column, origin, channels, exists, n_rows, n_columns, STORED, PIXELS)
    z += tl.load(norm + channels)[:, None]
    u = tl.load(norm + STORED + channels)[:, None] * z + tl.load(norm + 2 * STORED + channels)[:, None]
    place = scratch_places(row, column, origin, heads, n_columns, HEADS)
    dz = tl.load(slope + place, mask=exists[None, :], other=0.0)
    back = tl.load(reduce + channels[:, None] + heads[None, :] * STORED)
    g = tl.dot(back, dz, input_precision=PRECISION)
    return z, relu6(u), tl.where((u > 0.0) & (u < 6.0), g, 0.0), dz


@triton.jit(do_not_specialize=UNSPECIALISED)
def norm_sums_kernel(
    wide, slope, norm, local, reduce, sums, grad_reduce, start, count, origin, buffer_rows, n_tiles, n_rows, n_columns,
    HEADS: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ g, Σ g ẑ₂ and dR = Σ dz₃ y₂ᵀ of a share of a band's tiles, for one group of channels."""
    heads = tl.arange(0, HEADS)
    channels = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    total = tl.zeros((GROUP, PIXELS), tl.float32)
    products = tl.zeros((GROUP, PIXELS), tl.float32)
    weight = tl.zeros((HEADS, GROUP), tl.float32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        slot, row, column, exists = locate(tile, start, count, n_columns, ROWS, PIXELS)
        first = slot * buffer_rows * n_columns
        z, y, g, dz = through_relu6(
            wide + first * STORED, slope + first * HEADS, norm, local, reduce, row, column, origin, channels, exists,
            n_rows, n_columns, HEADS, STORED, PIXELS, PRECISION,
        )  # fmt: skip
        total += g
        products += g * z
        weight = tl.dot(dz, tl.trans(y.to(dz.dtype)), weight, input_precision=PRECISION)
    at = tl.program_id(0) * 2 * STORED + channels
    tl.store(sums + at, tl.sum(total, 1))
    tl.store(sums + at + STORED, tl.sum(products, 1))
    tl.store(grad_reduce + (tl.program_id(0) * HEADS + heads)[:, None] * STORED + channels[None, :], weight)


@triton.jit(do_not_specialize=UNSPECIALISED)
def grad_convolved_kernel(
    wide, slope, norm, local, reduce, factors, grad_convolved, start, count, origin, buffer_rows, n_tiles, n_rows,
    n_columns, HEADS: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr, PIXELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dz₂ = f₀ g + f₁ ẑ₂ + f₂ of one tile and group."""
    channels = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    slot, row, column, exists = locate(tl.program_id(0), start, count, n_columns, ROWS, PIXELS)
    first = slot * buffer_rows * n_columns
    z, _y, g, _dz = through_relu6(
        wide + first * STORED, slope + first * HEADS, norm, local, reduce, row, column, origin, channels, exists,
        n_rows, n_columns, HEADS, STORED, PIXELS, PRECISION,
    )  # fmt: skip
    result = tl.load(factors + channels)[:, None] * g + tl.load(factors + STORED + channels)[:, None] * z
    result += tl.load(factors + 2 * STORED + channels)[:, None]
    place = first * STORED + scratch_places(row, column, origin, channels, n_columns, STORED)
    tl.store(grad_convolved + place, result.to(grad_convolved.dtype.element_ty), mask=exists[None, :])


@triton.jit
def add_taps(
    result, sums, y, grad_convolved, local, row, column, origin, channels, exists, n_rows, n_columns,
    DOWN: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """One row of taps of the convolution back, and of the gradients of its three weights."""
    left, middle, right = sums
    weights = local + 3 * (DOWN + 1) * STORED + channels
    near = load_near(grad_convolved, row - DOWN, column + 1, origin, channels, exists, n_rows, n_columns, STORED)
    result += tl.load(weights)[:, None] * near
    left += y * near
    near = load_near(grad_convolved, row - DOWN, column, origin, channels, exists, n_rows, n_columns, STORED)
    result += tl.load(weights + STORED)[:, None] * near
    middle += y * near
    near = load_near(grad_convolved, row - DOWN, column - 1, origin, channels, exists, n_rows, n_columns, STORED)
    result += tl.load(weights + 2 * STORED)[:, None] * near
    right += y * near
    return result, (left, middle, right)


@triton.jit
def store_taps(partial, sums, STORED: tl.constexpr):
    """Gradients of one row of taps."""
    left, middle, right = sums
    tl.store(partial, tl.sum(left, 1))
    tl.store(partial + STORED, tl.sum(middle, 1))
    tl.store(partial + 2 * STORED, tl.sum(right, 1))


@triton.jit(do_not_specialize=UNSPECIALISED)
def grad_expanded_kernel(
    wide, grad_convolved, local, grad_expanded, partial, start, count, origin, buffer_rows, n_tiles, n_rows, n_columns,
    CLIP: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Of a share of a band's tiles: the gradient g through relu6 of y₁, written over it; that of the weights; Σ g."""
    channels = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    nothing = tl.zeros((GROUP, PIXELS), tl.float32)
    total = nothing
    above, level, below = (nothing, nothing, nothing), (nothing, nothing, nothing), (nothing, nothing, nothing)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        slot, row, column, exists = locate(tile, start, count, n_columns, ROWS, PIXELS)
        first = slot * buffer_rows * n_columns * STORED
        own = first + scratch_places(row, column, origin, channels, n_columns, STORED)
        y = tl.load(wide + own, mask=exists[None, :], other=0.0).to(tl.float32)
        near = grad_convolved + first
        g = nothing
        g, above = add_taps(
            g, above, y, near, local, row, column, origin, channels, exists, n_rows, n_columns, -1, STORED
        )
        g, level = add_taps(
            g, level, y, near, local, row, column, origin, channels, exists, n_rows, n_columns, 0, STORED
        )
        g, below = add_taps(
            g, below, y, near, local, row, column, origin, channels, exists, n_rows, n_columns, 1, STORED
        )
        if CLIP:
            g = tl.where((y > 0.0) & (y < 6.0), g, 0.0)
        total += g
        tl.store(grad_expanded + own, g.to(grad_expanded.dtype.element_ty), mask=exists[None, :])
    partial += tl.program_id(0) * 10 * STORED + channels
    store_taps(partial, above, STORED)
    store_taps(partial + 3 * STORED, level, STORED)
    store_taps(partial + 6 * STORED, below, STORED)
    tl.store(partial + 9 * STORED, tl.sum(total, 1))
