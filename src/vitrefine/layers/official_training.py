"""The authors' refiner, and the batch norm after it, by kernels that learn: statistics of the batch, gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.ops.official_refine_training import Norm, TrainedMix, kernels_serve, official_refine_training


def norms_of(refiner: nn.Module, last: nn.Module) -> list[Any]:
    """What normalises, in its order, in a refiner of the form that kernels know; nothing in one of another form."""
    if not isinstance(refiner, OfficialRefiner) or refiner.dense or refiner.local.kernel_size != (3, 3):
        return []
    first = [refiner.expand[1]] if isinstance(refiner.expand, nn.Sequential) else []
    return [*first, refiner.local_norm, refiner.reduce_norm, last]


def learns_by_kernels(maps: Tensor, refiner: nn.Module, last: nn.Module) -> bool:
    """Whether the kernels do just what these modules would; norms that ask other processes are left alone."""
    norms = norms_of(refiner, last)
    plain = all(type(norm) is nn.BatchNorm2d and norm.training and norm.affine for norm in norms)
    if not norms or not plain or any(not norm.track_running_stats or norm.momentum is None for norm in norms):
        return False
    assert isinstance(refiner, OfficialRefiner)
    several = maps.numel() > maps.shape[1]  # of a single value a batch norm has no variance
    return several and kernels_serve(maps, refiner.local.weight.shape[0])


def _norm(norm: nn.BatchNorm2d) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps)


@torch.no_grad()
def _remember(norm: nn.BatchNorm2d, moments: tuple[Tensor, Tensor], n: int) -> None:
    """Update running statistics as `nn.BatchNorm2d` does: of the variance, the unbiased one."""
    assert norm.momentum is not None
    assert norm.num_batches_tracked is not None
    mean, variance = moments
    norm.num_batches_tracked.add_(1)
    for running, batch in ((norm.running_mean, mean), (norm.running_var, variance * (n / (n - 1)))):
        assert running is not None
        running.lerp_(batch.to(running.dtype), norm.momentum)


def refine_and_learn(
    maps: Tensor, refiner: OfficialRefiner, last: nn.BatchNorm2d, factor: float, *, impl: str = "auto"
) -> Tensor:
    """factor · last(refiner(maps)) in training; `impl` as of `official_refine_training`."""
    norms = norms_of(refiner, last)
    expand, expand_norm = None, None
    if isinstance(refiner.expand, nn.Sequential):
        conv = refiner.expand[0]
        assert isinstance(conv, nn.Conv2d)
        expand, expand_norm = conv.weight.flatten(1), _norm(norms[0])
    mix = TrainedMix(
        expand,
        expand_norm,
        refiner.local.weight.squeeze(1),
        _norm(refiner.local_norm),
        refiner.reduce.weight.flatten(1),
        _norm(refiner.reduce_norm),
        _norm(last),
    )
    refined, moments = official_refine_training(maps, mix, factor=factor, impl=impl)
    for norm, some in zip(norms, (m for m in moments if m is not None), strict=True):
        _remember(norm, some, maps.numel() // maps.shape[1])
    return refined
