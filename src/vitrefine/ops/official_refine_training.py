"""The Refiner authors' refinement of maps as it is trained, its norms with the statistics of the batch.

    A ↦ f · BN₄(A + BN₃(R relu6(BN₂(w ⊛ relu6(BN₁(E A))))))

with E (H', H), w one 3×3 kernel a map and R (H, H'); zeros surround what is convolved. Without E the maps themselves
are convolved, without a last norm the outer BN is left out. `impl="reference"` is the specification, and keeps the H'
maps for the backward pass, several times over; `impl="triton"` makes them again, some images at a time.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.choice import HALF, computes_in, demand_gpu
from vitrefine.ops.official_refine import MOST_HEADS, kernel_serves

IMPLEMENTATIONS = ("auto", "reference", "triton")
MOST_HIDDEN = 64
MOST_PIXELS = 1 << 24  # of a map: the kernels count what they expand of one image in 32 bits


class Norm(NamedTuple):
    """A batch norm's weights (C,)."""

    weight: Tensor
    bias: Tensor
    eps: float = 1e-5


class TrainedMix(NamedTuple):
    """Weights of one refinement."""

    expand: Tensor | None  # (H', H)
    expand_norm: Norm | None
    local: Tensor  # (H', 3, 3)
    local_norm: Norm
    reduce: Tensor  # (H, H')
    reduce_norm: Norm
    last_norm: Norm | None = None


class BatchMoments(NamedTuple):
    """Means and (biased) variances (C,) of what the norms normalised, in float32, without gradients."""

    expand: tuple[Tensor, Tensor] | None
    local: tuple[Tensor, Tensor]
    reduce: tuple[Tensor, Tensor]
    last: tuple[Tensor, Tensor] | None


def _fit(maps: Tensor, hidden: int) -> bool:
    return maps.shape[1] <= MOST_HEADS and hidden <= MOST_HIDDEN and maps.shape[2] * maps.shape[3] <= MOST_PIXELS


def kernels_serve(maps: Tensor, hidden: int) -> bool:
    """Whether `auto` takes the kernels for these maps."""
    return _fit(maps, hidden) and kernel_serves(maps, hidden)


def _normalise(values: Tensor, norm: Norm) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    weight, bias = norm.weight.to(values.dtype), norm.bias.to(values.dtype)
    return F.batch_norm(values, None, None, weight, bias, training=True, eps=norm.eps), (mean.float(), variance.float())


def _reference(maps: Tensor, mix: TrainedMix, factor: float) -> tuple[Tensor, BatchMoments]:
    local, reduce = mix.local.to(maps.dtype), mix.reduce.to(maps.dtype)
    hidden, expanded, last = maps, None, None
    if mix.expand is not None and mix.expand_norm is not None:
        hidden = F.conv2d(maps, mix.expand.to(maps.dtype)[:, :, None, None])
        hidden, expanded = _normalise(hidden, mix.expand_norm)
        hidden = F.relu6(hidden)
    hidden, convolved = _normalise(F.conv2d(hidden, local[:, None], padding=1, groups=len(local)), mix.local_norm)
    refined, reduced = _normalise(F.conv2d(F.relu6(hidden), reduce[:, :, None, None]), mix.reduce_norm)
    refined = maps + refined
    if mix.last_norm is not None:
        refined, last = _normalise(refined, mix.last_norm)
    return factor * refined, BatchMoments(expanded, convolved, reduced, last)


def _by_kernels(maps: Tensor, mix: TrainedMix, factor: float) -> tuple[Tensor, BatchMoments]:
    from vitrefine.ops.kernels.official_refine_training_forward import Weights
    from vitrefine.ops.kernels.official_refine_training_op import official_refine_training_triton

    dtype, hidden = computes_in(maps), mix.local.shape[0]
    dtype = dtype if dtype in HALF else maps.dtype
    if dtype not in (*HALF, torch.float32) or not _fit(maps, hidden):
        _, heads, rows, columns = maps.shape
        raise UserError(
            f"the kernels that refine maps in training take at most {MOST_HEADS} maps of {MOST_PIXELS} pixels, "
            f"{MOST_HIDDEN} between, in half or single precision, not {heads} of {rows}×{columns}, {hidden} between, "
            f"in {dtype}; use impl='reference'"
        )
    demand_gpu(maps, "reference")
    norms = (mix.expand_norm, mix.local_norm, mix.reduce_norm, mix.last_norm)
    pairs: list[Any] = [(None, None) if norm is None else norm[:2] for norm in norms]
    weights = Weights(*(mix.expand, *pairs[0], mix.local, *pairs[1], mix.reduce, *pairs[2], *pairs[3]))
    eps = [1.0 if norm is None else norm.eps for norm in norms]
    out, found = official_refine_training_triton(maps.to(dtype), weights, eps, factor)
    moments = (found.expanded, found.convolved, found.reduced, found.last)
    there: list[Any] = [None if norm is None else (some[0], some[1]) for norm, some in zip(norms, moments, strict=True)]
    return out, BatchMoments(*there)


def official_refine_training(
    maps: Tensor, mix: TrainedMix, *, factor: float = 1.0, impl: str = "auto"
) -> tuple[Tensor, BatchMoments]:
    """Refine (B, H, Nq, Nk) maps with norms that take the statistics of this batch.

    Args:
        maps: What comes in.
        mix: Weights, in any floating-point type.
        factor: What the result is multiplied by.
        impl: `reference`, `triton`, or `auto`: the kernels on a GPU in half precision.

    Returns:
        Refined maps, and the moments with which the norms' running statistics are to be updated.
    """
    check_choice("implementation", impl, IMPLEMENTATIONS)
    if impl == "triton" or (impl == "auto" and kernels_serve(maps, mix.local.shape[0])):
        return _by_kernels(maps, mix, factor)
    return _reference(maps, mix, factor)
