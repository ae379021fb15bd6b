"""From maps to maps: y₁ = relu6(E A + b) of a band, z₃ = R relu6(w ⊛ y₁ + b) of it, and the result.

Scratch memory has channels innermost; backward, the gradient of z₃ is laid out there beside y₁.
"""

import triton
import triton.language as tl

from vitrefine.ops.kernels.official_refine import load_pixels
from vitrefine.ops.kernels.official_refine_tiles import (
    GROUP,
    UNSPECIALISED,
    convolve,
    locate,
    relu6,
    scratch_places,
    store_pixels,
)


@triton.jit
def blended(a, z, d, coefficients, heads, HEADS: tl.constexpr):
    """c₀ A + c₁ z₃ + c₂ d + c₃, head by head: all that batch norms do to a gradient behind them."""
    total = tl.load(coefficients + heads)[:, None] * a.to(tl.float32)
    total += tl.load(coefficients + HEADS + heads)[:, None] * z.to(tl.float32)
    total += tl.load(coefficients + 2 * HEADS + heads)[:, None] * d.to(tl.float32)
    return total + tl.load(coefficients + 3 * HEADS + heads)[:, None]


@triton.jit(do_not_specialize=["first_image", *UNSPECIALISED])
def expand_kernel(
    maps, weight, bias, wide, grad, reduced, coefficients, slope, maps_image, maps_head, maps_row, grad_image,
    grad_head, grad_row, first_image, start, count, origin, buffer_rows, n_tiles, n_heads, n_rows, n_columns,
    CLIP: tl.constexpr, BELOW_SIX: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, STORED: tl.constexpr,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile, all channels; without CLIP the maps are laid out alike and left as they are.

    What is clipped must be told from what is not when gradients are taken: E A is therefore exact, E in two parts, and
    nothing below six is rounded up to it.
    """
    heads = tl.arange(0, HEADS)
    slot, row, column, exists = locate(tl.program_id(0), start, count, n_columns, ROWS, PIXELS)
    image = first_image + slot
    a = load_pixels(maps + image * maps_image, maps_head, maps_row, heads, row, column, n_heads, exists)
    wide += slot * buffer_rows * n_columns * STORED
    for group in range(STORED // GROUP):
        channels = group * GROUP + tl.arange(0, GROUP)
        some = tl.load(weight + channels[:, None] * HEADS + heads[None, :])
        y = tl.dot(some, a.to(some.dtype), input_precision=PRECISION)
        if CLIP:
            rest = tl.load(weight + (STORED + channels)[:, None] * HEADS + heads[None, :])
            y = tl.dot(rest, a.to(rest.dtype), y, input_precision=PRECISION) + tl.load(bias + channels)[:, None]
            y = tl.where(y < 6.0, tl.minimum(tl.maximum(y, 0.0), BELOW_SIX), 6.0)
        place = scratch_places(row, column, origin, channels, n_columns, STORED)
        tl.store(wide + place, y.to(wide.dtype.element_ty), mask=exists[None, :])
    if BACKWARD:
        d = load_pixels(grad + image * grad_image, grad_head, grad_row, heads, row, column, n_heads, exists)
        plane = n_rows * n_columns
        z = load_pixels(reduced + image * n_heads * plane, plane, n_columns, heads, row, column, n_heads, exists)
        values = blended(a, z, d, coefficients, heads, HEADS)
        slope += slot * buffer_rows * n_columns * HEADS
        place = scratch_places(row, column, origin, heads, n_columns, HEADS)
        tl.store(slope + place, values.to(slope.dtype.element_ty), mask=exists[None, :])


@triton.jit(do_not_specialize=["first_image", *UNSPECIALISED])
def reduce_kernel(
    wide, local, bias, reduce, reduced, first_image, start, count, origin, buffer_rows, n_tiles, n_heads, n_rows,
    n_columns, HEADS: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr, PIXELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """z₃ of one tile."""
    heads = tl.arange(0, HEADS)
    slot, row, column, exists = locate(tl.program_id(0), start, count, n_columns, ROWS, PIXELS)
    wide += slot * buffer_rows * n_columns * STORED
    z = tl.zeros((HEADS, PIXELS), tl.float32)
    for group in range(STORED // GROUP):
        channels = group * GROUP + tl.arange(0, GROUP)
        y = convolve(wide, local, row, column, origin, channels, exists, n_rows, n_columns, STORED, PIXELS)
        y = relu6(y + tl.load(bias + channels)[:, None])
        some = tl.load(reduce + heads[:, None] * STORED + channels[None, :])
        z = tl.dot(some, y.to(some.dtype), z, input_precision=PRECISION)
    plane = n_rows * n_columns
    reduced += (first_image + slot) * n_heads * plane
    store_pixels(reduced, z, plane, n_columns, heads, row, column, n_heads, exists)


@triton.jit(do_not_specialize=UNSPECIALISED)
def blend_kernel(
    maps, reduced, coefficients, out, maps_image, maps_head, maps_row, out_image, out_head, out_row, n_heads, n_rows,
    n_columns, HEADS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """c₀ A + c₁ z₃ + c₂ of one tile."""
    heads = tl.arange(0, HEADS)
    image, row, column, exists = locate(tl.program_id(0), 0, n_rows, n_columns, 1, PIXELS)
    a = load_pixels(maps + image * maps_image, maps_head, maps_row, heads, row, column, n_heads, exists)
    plane = n_rows * n_columns
    z = load_pixels(reduced + image * n_heads * plane, plane, n_columns, heads, row, column, n_heads, exists)
    total = tl.load(coefficients + heads)[:, None] * a.to(tl.float32)
    total += tl.load(coefficients + HEADS + heads)[:, None] * z.to(tl.float32)
    total += tl.load(coefficients + 2 * HEADS + heads)[:, None]
    store_pixels(out + image * out_image, total, out_head, out_row, heads, row, column, n_heads, exists)
