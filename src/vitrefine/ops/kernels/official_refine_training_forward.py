"""Forward pass of the authors' refinement in training: three sweeps for three norms, and one for the result.

1. Σ A and Σ A Aᵀ, from which the norm of E A follows
2. a band at a time, y₁ = relu6(BN(E A)), and the moments of z₂ = w ⊛ y₁
3. the same again, with z₃ = R relu6(BN(z₂)), which is kept, and its moments with A
4. BN(A + BN(z₃)) = c₀ A + c₁ z₃ + c₂, head by head
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrefine.ops.aligned_maps import empty_maps
from vitrefine.ops.kernels.official_refine_expand_reduce import blend_kernel, expand_kernel, reduce_kernel
from vitrefine.ops.kernels.official_refine_moments import convolved_kernel, maps_moments, merge, products
from vitrefine.ops.kernels.official_refine_tiles import HALO, Band
from vitrefine.ops.kernels.official_refine_training_call import Call


class Weights(NamedTuple):
    """Of the operator, in any floating-point type; without expansion, or a last norm, theirs are None."""

    expand: Tensor | None  # (H', H)
    expand_weight: Tensor | None  # (H',), of the norm
    expand_bias: Tensor | None
    local: Tensor  # (H', 3, 3)
    local_weight: Tensor
    local_bias: Tensor
    reduce: Tensor  # (H, H')
    reduce_weight: Tensor
    reduce_bias: Tensor
    last_weight: Tensor | None
    last_bias: Tensor | None

    def double(self) -> "Weights":
        """The same in float64, in which small tensors cost no more."""
        doubled: list[Any] = [None if weight is None else weight.double() for weight in self]
        return Weights(*doubled)


class Moments(NamedTuple):
    """What a forward pass finds out about a batch, and the backward pass wants to know."""

    maps: Tensor  # (1 + H, H): mean and covariance of A
    expanded: Tensor  # (2, H'): mean and variance of E A; of nothing without expansion
    convolved: Tensor  # (2, H'): of z₂
    reduced: Tensor  # (3, H): mean and variance of z₃, and its covariance with A
    last: Tensor  # (2, H): mean and variance of A + BN(z₃)


def empty_results(maps: Tensor, hidden: int, expands: bool) -> tuple[Tensor, ...]:
    """Result, z₃ and moments, uninitialised."""
    heads = maps.shape[1]
    shapes = ((1 + heads, heads), (2, hidden if expands else 0), (2, hidden), (3, heads), (2, heads))
    moments = (maps.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return empty_maps(maps, *maps.shape), maps.new_empty(maps.shape), *moments


class Expansion(NamedTuple):
    """Padded weights of E A + b with the norm in them."""

    weight: Tensor  # (2, channels, heads): a sum of two, in the type of the maps
    bias: Tensor
    wide: Tensor  # scratch memory for a band of y₁
    clips: bool

    @property
    def constants(self) -> dict[str, object]:
        """Of `expand_kernel`."""
        # Numbers from four to eight lie four times as far apart as those from one to two.
        return {"CLIP": self.clips, "BELOW_SIX": 6 - 4 * torch.finfo(self.wide.dtype).eps}

    def on(self, call: Call, band: Band) -> None:
        """Expand a band's maps into scratch memory."""
        maps = call.maps
        anything = (maps, maps, self.bias, maps)  # pointers that are not followed
        strides = (*maps.stride()[:3], 0, 0, 0)
        constants: dict[str, Any] = {**self.constants, "BACKWARD": False, "HEADS": call.heads, **call.products}
        arguments = (maps, self.weight, self.bias, self.wide, *anything, *strides)
        call.on_band("expand", expand_kernel, band, *arguments, halo=HALO, grouped=False, **constants)


def expansion(call: Call, weights: Weights, maps_mean: Tensor, variance: Tensor, eps: float) -> Expansion:
    """E A with its batch norm folded in; without expansion the maps themselves."""
    size, dtype = (2, call.stored, call.heads), call.maps.dtype
    if weights.expand is None or weights.expand_weight is None or weights.expand_bias is None:
        same = torch.eye(call.hidden, device=call.maps.device)
        wide = call.scratch(call.stored)
        return Expansion(call.fill(size, same[None], dtype), same.new_zeros(call.stored), wide, clips=False)
    scale = weights.expand_weight * (variance + eps).rsqrt()
    weight = scale[:, None] * weights.expand
    parts = torch.stack([weight, weight - weight.to(dtype)])
    bias = call.fill((call.stored,), weights.expand_bias - weight @ maps_mean)
    return Expansion(call.fill(size, parts, dtype), bias, call.scratch(call.stored, call.clipped), clips=True)


def _convolved_moments(call: Call, expanding: Expansion, weights: Weights) -> Tensor:
    """Mean and variance of z₂; the last band stays in scratch memory."""
    local = call.fill((9, call.stored), weights.local.flatten(1).T)
    partial = call.partial("convolved", 3, call.stored)
    for band, share in zip(call.bands, partial, strict=True):
        expanding.on(call, band)
        call.on_band("convolved", convolved_kernel, band, expanding.wide, local, share)
    return merge(partial.flatten(0, 1)[..., : call.hidden])


def _reduce(call: Call, expanding: Expansion, weights: Weights, norm: tuple[Tensor, Tensor], reduced: Tensor) -> None:
    """Fill z₃. The last band is in scratch memory already."""
    scale, shift = norm
    local = call.fill((9, call.stored), (scale[:, None] * weights.local.flatten(1)).T)
    bias = call.fill((call.stored,), shift)
    reduce = call.fill((call.heads, call.stored), weights.reduce, call.clipped)
    constants: dict[str, Any] = {"HEADS": call.heads, **call.products}
    for band in reversed(call.bands):
        if band != call.bands[-1]:
            expanding.on(call, band)
        arguments = (expanding.wide, local, bias, reduce, reduced)
        call.on_band("reduce", reduce_kernel, band, *arguments, grouped=False, **constants)


def _reduced_moments(call: Call, reduced: Tensor, maps_mean: Tensor) -> Tensor:
    """Mean and variance of z₃, and its covariance with the maps."""
    near = reduced[0].mean((1, 2), dtype=torch.float32)
    off, by_maps, squares = products(call, reduced, reduced, (near, maps_mean, near)) / call.n
    return torch.stack([near + off, (squares - off.square()).clamp(min=0), by_maps])


def refine(call: Call, weights: Weights, eps: list[float], factor: float) -> tuple[Tensor, ...]:
    """What `empty_results` lists."""
    weights = weights.double()
    maps = call.maps
    out, reduced, *_ = empty_results(maps, call.hidden, weights.expand is not None)
    mean, covariance = maps_moments(call)
    expanded = mean.new_empty((2, 0))
    if weights.expand is not None:
        variance = ((weights.expand @ covariance) * weights.expand).sum(1).clamp(min=0)
        expanded = torch.stack([weights.expand @ mean, variance])
    expanding = expansion(call, weights, mean, expanded[1], eps[0])
    convolved = _convolved_moments(call, expanding, weights)
    scale = weights.local_weight * (convolved[1] + eps[1]).rsqrt()
    norm = scale, weights.local_bias - scale * convolved[0]
    _reduce(call, expanding, weights, norm, reduced)
    reduced_moments = _reduced_moments(call, reduced, mean)

    inner = weights.reduce_weight * (reduced_moments[1] + eps[2]).rsqrt()
    shift = weights.reduce_bias - inner * reduced_moments[0]
    variance = covariance.diagonal() + 2 * inner * reduced_moments[2] + inner.square() * reduced_moments[1]
    last = torch.stack([mean + weights.reduce_bias, variance.clamp(min=0)])
    outer = torch.ones_like(mean)
    if weights.last_weight is not None and weights.last_bias is not None:
        outer = weights.last_weight * (last[1] + eps[3]).rsqrt()
        shift = outer * (shift - last[0]) + weights.last_bias
    coefficients = call.rows(call.heads, factor * outer, factor * outer * inner, factor * shift)
    strides = (*maps.stride()[:3], *out.stride()[:3])
    call.everywhere("blend", blend_kernel, maps, reduced, coefficients, out, *strides, HEADS=call.heads)
    found = Moments(torch.cat([mean[None], covariance]), expanded, convolved, reduced_moments, last)
    return out, reduced, *(some.float() for some in found)
