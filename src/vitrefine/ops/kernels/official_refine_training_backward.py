"""Backward pass of the authors' refinement in training: nothing was kept but the maps, z₃ and the moments of a batch.

1. the gradient of z₃, a blend of A, z₃ and the result's gradient d (`undo_norms`)
2. a band at a time, y₁ again, then g₂ behind the second relu6: dR, and the sums for the norm of z₂
3. the same again, now with dz₂ as a whole; back through the convolution: its weights, and g₁ behind the first
   relu6; what g₁ leaves in the maps' gradient and in that of E
4. to the gradient of the maps, all that is linear in A, z₃ and d
"""

from typing import Any

import torch
from torch import Tensor

from vitrefine.ops.kernels.official_refine_expand_reduce import expand_kernel
from vitrefine.ops.kernels.official_refine_grad_convolved import (
    grad_convolved_kernel,
    grad_expanded_kernel,
    norm_sums_kernel,
)
from vitrefine.ops.kernels.official_refine_grad_maps import contract_kernel, grad_maps_kernel, undo_norms
from vitrefine.ops.kernels.official_refine_tiles import HALO, Band
from vitrefine.ops.kernels.official_refine_training_call import Call
from vitrefine.ops.kernels.official_refine_training_forward import Moments, Weights, expansion
from vitrefine.ops.kernels.shapes import padded


def _summed(partial: Tensor) -> Tensor:
    """The sum of what all programs of all launches left, in float64."""
    return partial.sum((0, 1), dtype=torch.float64)


class Backward:
    """One backward pass.

    Args:
        call: Sizes, scratch memory, launches.
        grad: Gradient of the result, rows contiguous.
        reduced: z₃.
        weights: Of the operator.
        moments: What the forward pass found.
        eps: Of the four norms.
        factor: Of the result.
    """

    def __init__(
        self, call: Call, grad: Tensor, reduced: Tensor, weights: Weights, moments: Moments, eps: list[float],
        factor: float,
    ) -> None:  # fmt: skip
        self.call, self.grad, self.reduced = call, grad, reduced
        self.weights, self.moments, self.eps = weights.double(), Moments(*(some.double() for some in moments)), eps
        self.constants: dict[str, Any] = {"HEADS": call.heads, **call.products}
        self.behind = undo_norms(call, grad, reduced, self.weights, self.moments, eps, factor)
        self.expanding = expansion(call, self.weights, self.moments.maps[0], self.moments.expanded[1], eps[0])
        self.slope_coefficients = call.fill((4, call.heads), self.behind.slope)
        self.wide, self.slope = self.expanding.wide, call.scratch(call.heads)
        mean, variance = self.moments.convolved
        self.inverse = (variance + eps[1]).rsqrt()
        self.taps = self.weights.local.flatten(1).T
        self.again = (
            self.wide,
            self.slope,
            call.rows(call.stored, -self.inverse * mean, self.weights.local_weight, self.weights.local_bias),
            call.fill((9, call.stored), self.inverse * self.taps),
            call.fill((call.heads, call.stored), self.weights.reduce, call.maps.dtype),
        )

    def prepare(self, band: Band) -> None:
        """Lay out a band's y₁ and gradient of z₃."""
        call, expanding = self.call, self.expanding
        arguments = (call.maps, expanding.weight, expanding.bias, self.wide, self.grad, self.reduced)
        strides = (*call.maps.stride()[:3], *self.grad.stride()[:3])
        call.on_band(
            "expand", expand_kernel, band, *arguments, self.slope_coefficients, self.slope, *strides, halo=HALO,
            grouped=False, BACKWARD=True, **expanding.constants, **self.constants,
        )  # fmt: skip

    def local_norm(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the weight and bias of the norm of z₂, and of R; the last band stays in scratch memory."""
        call = self.call
        sums = call.partial("norm_sums", 2, call.stored)
        grad_reduce = call.partial("norm_sums", call.heads, call.stored)
        for number, band in enumerate(call.bands):
            self.prepare(band)
            arguments = (*self.again, sums[number], grad_reduce[number])
            call.on_band("norm_sums", norm_sums_kernel, band, *arguments, **self.constants)
        bias, weight = _summed(sums[..., : call.hidden])
        return weight, bias, _summed(grad_reduce[..., : call.n_heads, : call.hidden])

    def through_convolution(
        self, weight: Tensor, bias: Tensor, back: Tensor, grad_maps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the 3×3 weights, Σ g₁ and Σ g₁ (A - mean)ᵀ; `back` times g₁ goes into the maps' gradient.

        Args:
            weight, bias: What `local_norm` found.
            back: (H, H').
            grad_maps: Filled.
        """
        call = self.call
        width, scale = padded(call.hidden), self.weights.local_weight * self.inverse
        factors = call.rows(call.stored, scale, -scale * weight / call.n, -scale * bias / call.n)
        grad_convolved, taps = call.scratch(call.stored), call.fill((9, call.stored), self.taps)
        mean = call.fill((call.heads,), self.moments.maps[0])
        back = call.fill((call.heads, width), back, call.maps.dtype)
        sums = call.partial("grad_expanded", 10, call.stored)
        by_maps = call.partial("contract", call.heads, width)
        grad_expanded = self.wide.view(call.maps.dtype)  # the same memory: of y₁ there is no more need then
        for number, band in reversed(list(enumerate(call.bands))):
            if number + 1 < len(call.bands):
                self.prepare(band)
            call.on_band(
                "grad_convolved", grad_convolved_kernel, band, *self.again, factors, grad_convolved, halo=1,
                **self.constants,
            )  # fmt: skip
            call.on_band(
                "grad_expanded", grad_expanded_kernel, band, self.wide, grad_convolved, taps, grad_expanded,
                sums[number], CLIP=self.expanding.clips,
            )  # fmt: skip
            call.on_band(
                "contract", contract_kernel, band, grad_expanded, call.maps, mean, back, grad_maps, by_maps[number],
                *call.maps.stride()[:3], grouped=False, WIDE=width, **self.constants,
            )  # fmt: skip
        found = _summed(sums[..., : call.hidden])
        return found[:9].T.unflatten(1, (3, 3)), found[9], _summed(by_maps[..., : call.n_heads, : call.hidden]).T

    def finish(self, direct: Tensor, mix: Tensor, grad_maps: Tensor) -> None:
        """Add what is linear in A, z₃ and d to the maps' gradient."""
        call = self.call
        mean, direct = call.fill((call.heads,), self.moments.maps[0]), call.fill((4, call.heads), direct)
        mix = call.fill((call.heads, call.heads), mix, call.maps.dtype)
        strides = (*self.grad.stride()[:3], *call.maps.stride()[:3])
        arguments = (self.grad, call.maps, self.reduced, mean, direct, mix, grad_maps, *strides)
        call.everywhere("grad_maps", grad_maps_kernel, *arguments, **self.constants)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of the maps and of each of the weights."""
        call, behind, expand = self.call, self.behind, self.weights.expand
        local_weight, local_bias, reduce = self.local_norm()
        grad_maps = torch.empty_like(call.maps, memory_format=torch.contiguous_format)
        direct, mix = behind.direct, torch.zeros_like(self.moments.maps[1:])
        grad_expand = expand_weight = expand_bias = None
        if expand is None or self.weights.expand_weight is None:
            same = torch.eye(call.hidden, device=call.maps.device)
            local, _, _ = self.through_convolution(local_weight, local_bias, same, grad_maps)
        else:
            inverse = (self.moments.expanded[1] + self.eps[0]).rsqrt()
            scale, unit = self.weights.expand_weight * inverse, inverse[:, None] * expand
            back = (scale[:, None] * expand).T
            local, expand_bias, by_maps = self.through_convolution(local_weight, local_bias, back, grad_maps)
            expand_weight = (unit * by_maps).sum(1)
            grad_expand = scale[:, None] * (by_maps - expand_weight[:, None] * (unit @ self.moments.maps[1:]))
            mix = -(back * (expand_weight / call.n)) @ unit
            direct = torch.cat([direct[:3], (direct[3] - back @ (expand_bias / call.n))[None]])
        self.finish(direct, mix, grad_maps)
        return (
            *(grad_maps, grad_expand, expand_weight, expand_bias, local, local_weight, local_bias),
            *(reduce, behind.reduce_weight, behind.reduce_bias, behind.last_weight, behind.last_bias),
        )
