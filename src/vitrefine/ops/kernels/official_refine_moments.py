"""Sums over all pixels that batch norms need, in partial sums of a fixed order (no atomics: repeatable bits).

The norm of expanded maps needs none of its own: the mean of E A is E times the mean of A, its covariance E Cov(A) Eᵀ.
What is squared is centred first, around a value that lies near the mean, so that nothing cancels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.official_refine import load_pixels
from vitrefine.ops.kernels.official_refine_tiles import GROUP, UNSPECIALISED, convolve, locate
from vitrefine.ops.kernels.official_refine_training_call import Call


@triton.jit(do_not_specialize=UNSPECIALISED)
def gram_kernel(
    maps, pilot, sums, grams, maps_image, maps_head, maps_row, n_tiles, n_heads, n_rows, n_columns,
    HEADS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ (A - pilot) and Σ (A - pilot)(A - pilot)ᵀ of a share of the tiles."""
    heads = tl.arange(0, HEADS)
    centre = tl.load(pilot + heads)
    total = tl.zeros((HEADS, PIXELS), tl.float32)
    gram = tl.zeros((HEADS, HEADS), tl.float32)
    cross = tl.zeros((HEADS, HEADS), tl.float32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        image, row, column, exists = locate(tile, 0, n_rows, n_columns, 1, PIXELS)
        some = load_pixels(maps + image * maps_image, maps_head, maps_row, heads, row, column, n_heads, exists)
        inside = (heads < n_heads)[:, None] & exists[None, :]
        off = tl.where(inside, some.to(tl.float32) - centre[:, None], 0.0)
        total += off
        most = off.to(maps.dtype.element_ty)  # off is a sum of two; the square of the smaller one is nothing
        rest = (off - most.to(tl.float32)).to(maps.dtype.element_ty)
        gram = tl.dot(most, tl.trans(most), gram, input_precision=PRECISION)
        cross = tl.dot(most, tl.trans(rest), cross, input_precision=PRECISION)
    tl.store(sums + tl.program_id(0) * HEADS + heads, tl.sum(total, 1))
    cells = (tl.program_id(0) * HEADS + heads)[:, None] * HEADS + heads[None, :]
    tl.store(grams + cells, gram + cross + tl.trans(cross))


@triton.jit(do_not_specialize=UNSPECIALISED)
def convolved_kernel(
    wide, local, partial, start, count, origin, buffer_rows, n_tiles, n_rows, n_columns, STORED: tl.constexpr,
    ROWS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Of a share of a band's tiles, for one group of channels after the convolution: mean, Σ (z - mean)², count."""
    channels = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    pilot = tl.zeros((GROUP,), tl.float32)
    total = tl.zeros((GROUP, PIXELS), tl.float32)
    squares = tl.zeros((GROUP, PIXELS), tl.float32)
    pixels = tl.zeros((PIXELS,), tl.int32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        slot, row, column, exists = locate(tile, start, count, n_columns, ROWS, PIXELS)
        here = wide + slot * buffer_rows * n_columns * STORED
        z = convolve(here, local, row, column, origin, channels, exists, n_rows, n_columns, STORED, PIXELS)
        if tile == tl.program_id(0):
            pilot = tl.sum(z, 1) / tl.sum(exists.to(tl.float32), 0)
        off = tl.where(exists[None, :], z - pilot[:, None], 0.0)
        total += off
        squares += off * off
        pixels += exists.to(tl.int32)
    number = tl.sum(pixels, 0).to(tl.float32)
    off = tl.sum(total, 1)
    mean = off / tl.maximum(number, 1.0)
    partial += tl.program_id(0) * 3 * STORED + channels
    tl.store(partial, pilot + mean)
    tl.store(partial + STORED, tl.sum(squares, 1) - off * mean)
    tl.store(partial + 2 * STORED, tl.zeros((GROUP,), tl.float32) + number)


@triton.jit(do_not_specialize=UNSPECIALISED)
def products_kernel(
    grad, maps, reduced, means, partial, grad_image, grad_head, grad_row, maps_image, maps_head, maps_row, n_tiles,
    n_heads, n_rows, n_columns, HEADS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Σ d, Σ d A and Σ d z₃ of a share of the tiles, `means` taken away from each.

    d is the gradient of the result; or, in the forward pass, z₃ once more.
    """
    heads = tl.arange(0, HEADS)
    total = tl.zeros((HEADS, PIXELS), tl.float32)
    by_maps = tl.zeros((HEADS, PIXELS), tl.float32)
    by_reduced = tl.zeros((HEADS, PIXELS), tl.float32)
    plane = n_rows * n_columns
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        image, row, column, exists = locate(tile, 0, n_rows, n_columns, 1, PIXELS)
        inside = (heads < n_heads)[:, None] & exists[None, :]
        d = load_pixels(grad + image * grad_image, grad_head, grad_row, heads, row, column, n_heads, exists)
        a = load_pixels(maps + image * maps_image, maps_head, maps_row, heads, row, column, n_heads, exists)
        z = load_pixels(reduced + image * n_heads * plane, plane, n_columns, heads, row, column, n_heads, exists)
        d = tl.where(inside, d.to(tl.float32) - tl.load(means + heads)[:, None], 0.0)
        total += d
        by_maps += d * (a.to(tl.float32) - tl.load(means + HEADS + heads)[:, None])
        by_reduced += d * (z.to(tl.float32) - tl.load(means + 2 * HEADS + heads)[:, None])
    partial += tl.program_id(0) * 3 * HEADS + heads
    tl.store(partial, tl.sum(total, 1))
    tl.store(partial + HEADS, tl.sum(by_maps, 1))
    tl.store(partial + 2 * HEADS, tl.sum(by_reduced, 1))


def products(call: Call, some: Tensor, reduced: Tensor, means: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """(3, H) sums in float64, over all pixels, of a (B, H, Nq, Nk) tensor: alone, times maps, times z₃."""
    partial = call.partial("products", 3, call.heads, whole=True)
    strides = (*some.stride()[:3], *call.maps.stride()[:3])
    arguments = (some, call.maps, reduced, call.rows(call.heads, *means), partial, *strides)
    call.everywhere("products", products_kernel, *arguments, HEADS=call.heads)
    return partial[0, ..., : call.n_heads].sum(0, dtype=torch.float64)


def maps_moments(call: Call) -> tuple[Tensor, Tensor]:
    """Mean (H,) and covariance (H, H) of the maps, in float64."""
    maps, heads, n_heads = call.maps, call.heads, call.n_heads
    near = maps[0].mean((1, 2), dtype=torch.float32)
    sums = call.partial("gram", heads, whole=True)
    grams = call.partial("gram", heads, heads, whole=True)
    arguments = (maps, call.fill((heads,), near), sums, grams, *maps.stride()[:3])
    call.everywhere("gram", gram_kernel, *arguments, HEADS=heads, **call.products)
    off = sums[0, :, :n_heads].sum(0, dtype=torch.float64) / call.n
    gram = grams[0, :, :n_heads, :n_heads].sum(0, dtype=torch.float64) / call.n
    return near.double() + off, gram - torch.outer(off, off)


def merge(partial: Tensor) -> Tensor:
    """Mean and variance (2, channels) of all, in float64, out of (shares, 3, channels) of `convolved_kernel`."""
    mean, squares, count = partial.double().unbind(1)
    n = count.sum(0)
    whole = (count * mean).sum(0) / n
    variance = (squares + count * (mean - whole).square()).sum(0) / n
    return torch.stack([whole, variance.clamp(min=0)])
