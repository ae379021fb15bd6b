"""The authors' refiner and the batch norm after it: in evaluation folded into weights for one kernel."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.official_training import learns_by_kernels, norms_of, refine_and_learn
from vitrefine.ops.choice import no_autocast
from vitrefine.ops.official_refine import OfficialMix, kernel_serves, official_refine


def _affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """A batch norm in evaluation as x ↦ scale · x + shift, a channel at a time."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.float() + norm.eps).rsqrt() * norm.weight.float()
    return scale, norm.bias.float() - scale * norm.running_mean.float()


def fold(refiner: OfficialRefiner, last: _BatchNorm, factor: float) -> OfficialMix:
    """The weights of factor · last(refiner(maps)), in float32."""
    expand = expand_bias = None
    if isinstance(refiner.expand, nn.Sequential):
        conv, norm = refiner.expand[0], refiner.expand[1]
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, _BatchNorm)
        scale, expand_bias = _affine(norm)
        expand = scale[:, None] * conv.weight.float().flatten(1)
    scale, local_bias = _affine(refiner.local_norm)
    local = scale[:, None, None] * refiner.local.weight.float().squeeze(1)
    scale, shift = _affine(refiner.reduce_norm)
    outer, outer_shift = _affine(last)
    reduce = factor * (outer * scale)[:, None] * refiner.reduce.weight.float().flatten(1)
    return OfficialMix(
        expand, expand_bias, local, local_bias, reduce, factor * (outer * shift + outer_shift), factor * outer
    )


def _folds(refiner: nn.Module, last: nn.Module) -> bool:
    norms = norms_of(refiner, last)
    plain = all(isinstance(norm, _BatchNorm) and norm.affine and not norm.training for norm in norms)
    return bool(norms) and plain and all(norm.running_var is not None for norm in norms)


def refine_officially(maps: Tensor, refiner: nn.Sequential, factor: float = 1.0) -> Tensor:
    """factor · BN(DLA(maps)): by kernels on a GPU and in half precision, but for gradients in evaluation."""
    inner: Any = refiner[0]
    last: Any = refiner[1]
    if not torch.is_grad_enabled() and _folds(inner, last) and kernel_serves(maps, inner.local.weight.shape[0]):
        with no_autocast(maps):
            mix = fold(inner, last, factor)
        return official_refine(maps, mix)
    if learns_by_kernels(maps, inner, last):
        return refine_and_learn(maps, inner, last, factor)
    refined = refiner(maps)
    return refined if factor == 1.0 else factor * refined
