"""Backward, what is linear in the maps: both norms behind the reduction, and what the expansion leaves of its gradient.

Behind the reduction lies out = factor · BN(u), u = A + BN(z₃). With d the gradient of the result, the last norm gives
du = a d + b (A - mean) + c ẑ₃ + e, and the one before it makes of that the gradient of z₃, which has the same form.
Three sums over the pixels are all that it takes.

The norm of E A makes of its gradient g the gradient k (g - mean g - ẑ₁ mean(g ẑ₁)), and ẑ₁ is linear in A. So g itself
is needed once only, for Eᵀ k g and for Σ g (A - mean)ᵀ, from which every sum over pixels follows; what is left to do to
the gradient of the maps is an (H, H) product with A.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.official_refine import load_pixels
from vitrefine.ops.kernels.official_refine_expand_reduce import blended
from vitrefine.ops.kernels.official_refine_moments import products
from vitrefine.ops.kernels.official_refine_tiles import UNSPECIALISED, locate, scratch_places, store_pixels
from vitrefine.ops.kernels.official_refine_training_call import Call
from vitrefine.ops.kernels.official_refine_training_forward import Moments, Weights


class Behind(NamedTuple):
    """Coefficients (4, H) of A, z₃, d and 1, and the gradients of the norms' weights."""

    direct: Tensor  # of du, which goes to the maps by the residual path
    slope: Tensor  # of the gradient of z₃
    reduce_weight: Tensor
    reduce_bias: Tensor
    last_weight: Tensor | None = None
    last_bias: Tensor | None = None


def undo_norms(
    call: Call, grad: Tensor, reduced: Tensor, weights: Weights, moments: Moments, eps: list[float], factor: float
) -> Behind:
    """All of `Behind`, in float64."""
    maps_mean, (mean, variance, covariance) = moments.maps[0], moments.reduced
    nothing = torch.zeros_like(mean)
    total, by_maps, by_reduced = products(call, grad, reduced, (nothing, maps_mean, mean))
    inverse = (variance + eps[2]).rsqrt()
    gamma, by_unit = weights.reduce_weight, inverse * by_reduced
    a, b, e = nothing + factor, nothing, nothing
    last_weight = last_bias = None
    if weights.last_weight is not None:
        outer = (moments.last[1] + eps[3]).rsqrt()
        last_weight, last_bias = factor * outer * (by_maps + gamma * by_unit), factor * total
        a = factor * weights.last_weight * outer
        b = -weights.last_weight * outer.square() * last_weight / call.n
        e = -a * total / call.n
    c = gamma * b
    reduce_bias = a * total + call.n * e
    reduce_weight = a * by_unit + call.n * inverse * (b * covariance + c * inverse * variance)

    def coefficients(of_maps: Tensor, of_unit: Tensor, of_grad: Tensor, constant: Tensor) -> Tensor:
        of_reduced = of_unit * inverse
        return torch.stack([of_maps, of_reduced, of_grad, constant - of_maps * maps_mean - of_reduced * mean])

    scale = gamma * inverse
    slope = coefficients(b, c - reduce_weight / call.n, a, e - reduce_bias / call.n) * scale
    return Behind(coefficients(b, c, a, e), slope, reduce_weight, reduce_bias, last_weight, last_bias)


@triton.jit(do_not_specialize=["first_image", *UNSPECIALISED])
def contract_kernel(
    grad_expanded, maps, maps_mean, back, grad_maps, products, maps_image, maps_head, maps_row, first_image,
    start, count, origin, buffer_rows, n_tiles, n_heads, n_rows, n_columns, HEADS: tl.constexpr,
    STORED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a share of a band's tiles: Eᵀ k g, and Σ (A - mean) gᵀ."""
    heads = tl.arange(0, HEADS)
    channels = tl.arange(0, WIDE)
    plane = n_rows * n_columns
    mean = tl.load(maps_mean + heads)
    weight = tl.load(back + heads[:, None] * WIDE + channels[None, :])
    product = tl.zeros((HEADS, WIDE), tl.float32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        slot, row, column, exists = locate(tile, start, count, n_columns, ROWS, PIXELS)
        image = first_image + slot
        own = slot * buffer_rows * n_columns * STORED + scratch_places(row, column, origin, channels, n_columns, STORED)
        g = tl.load(grad_expanded + own, mask=(channels < STORED)[:, None] & exists[None, :], other=0.0)
        a = load_pixels(maps + image * maps_image, maps_head, maps_row, heads, row, column, n_heads, exists)
        off = (a.to(tl.float32) - mean[:, None]).to(g.dtype)
        product = tl.dot(off, tl.trans(g), product, input_precision=PRECISION)
        result = tl.dot(weight, g, input_precision=PRECISION)
        store_pixels(grad_maps + image * n_heads * plane, result, plane, n_columns, heads, row, column, n_heads, exists)
    tl.store(products + (tl.program_id(0) * HEADS + heads)[:, None] * WIDE + channels[None, :], product)


@triton.jit(do_not_specialize=UNSPECIALISED)
def grad_maps_kernel(
    grad, maps, reduced, maps_mean, coefficients, mix, grad_maps, grad_image, grad_head, grad_row, maps_image,
    maps_head, maps_row, n_heads, n_rows, n_columns, HEADS: tl.constexpr, PIXELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """To one tile of what `contract_kernel` left, c₀ A + c₁ z₃ + c₂ d + c₃ and mix · (A - mean) are added."""
    heads = tl.arange(0, HEADS)
    image, row, column, exists = locate(tl.program_id(0), 0, n_rows, n_columns, 1, PIXELS)
    d = load_pixels(grad + image * grad_image, grad_head, grad_row, heads, row, column, n_heads, exists)
    a = load_pixels(maps + image * maps_image, maps_head, maps_row, heads, row, column, n_heads, exists)
    plane = n_rows * n_columns
    z = load_pixels(reduced + image * n_heads * plane, plane, n_columns, heads, row, column, n_heads, exists)
    own = grad_maps + image * n_heads * plane
    left = load_pixels(own, plane, n_columns, heads, row, column, n_heads, exists)
    weight = tl.load(mix + heads[:, None] * HEADS + heads[None, :])
    off = (a.to(tl.float32) - tl.load(maps_mean + heads)[:, None]).to(weight.dtype)
    total = left.to(tl.float32) + blended(a, z, d, coefficients, heads, HEADS)
    total = tl.dot(weight, off, total, input_precision=PRECISION)
    store_pixels(own, total, plane, n_columns, heads, row, column, n_heads, exists)
