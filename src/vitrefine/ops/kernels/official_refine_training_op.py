"""The authors' refinement in training as one differentiable operator; its two passes have files of their own."""

from typing import Any

import torch
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.official_refine_training_backward import Backward
from vitrefine.ops.kernels.official_refine_training_call import Call
from vitrefine.ops.kernels.official_refine_training_forward import Moments, Weights, empty_results, refine
from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.shapes import rows_contiguous


@torch.library.custom_op("vitrefine::official_refine_training", mutates_args=())
@on_its_device
def _forward(
    maps: Tensor,
    expand: Tensor | None,
    expand_weight: Tensor | None,
    expand_bias: Tensor | None,
    local: Tensor,
    local_weight: Tensor,
    local_bias: Tensor,
    reduce: Tensor,
    reduce_weight: Tensor,
    reduce_bias: Tensor,
    last_weight: Tensor | None,
    last_bias: Tensor | None,
    eps: list[float],
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Result, z₃ and `Moments`."""
    weights = Weights(
        *(expand, expand_weight, expand_bias, local, local_weight, local_bias),
        *(reduce, reduce_weight, reduce_bias, last_weight, last_bias),
    )
    precision = product_precision(maps.dtype)
    launch = Launcher("official_refine_training", [maps], local.shape[0], expand is None, precision)
    out, reduced, *moments = refine(Call(launch, maps, local.shape[0], backward=False), weights, eps, factor)
    return out, reduced, moments[0], moments[1], moments[2], moments[3], moments[4]


@_forward.register_fake
def _(maps: Tensor, expand: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    return empty_results(maps, others[2].shape[0], expand is not None)


@torch.library.custom_op("vitrefine::official_refine_training_backward", mutates_args=())
@on_its_device
def _backward(
    grad: Tensor, maps: Tensor, reduced: Tensor, moments: list[Tensor], weights: list[Tensor], kinds: list[bool],
    eps: list[float], factor: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the maps and of those weights that there are: with expansion, with a last norm."""
    all_weights, grad = _whole(weights, kinds), rows_contiguous(grad)
    hidden = all_weights.local.shape[0]
    launch = Launcher(
        "official_refine_training_backward", [grad, maps, reduced], hidden, *kinds, product_precision(maps.dtype)
    )
    call = Call(launch, maps, hidden, backward=True)
    found = Backward(call, grad, reduced, all_weights, Moments(*moments), eps, factor).gradients()
    grads = [some for some in found[1:] if some is not None]
    assert found[0] is not None
    own = (weight.new_empty(weight.shape).copy_(some) for some, weight in zip(grads, weights, strict=True))
    return [found[0], *own]


@_backward.register_fake
def _(grad: Tensor, maps: Tensor, reduced: Tensor, moments: list[Tensor], weights: list[Tensor], *_: Any) -> list:
    return [maps.new_empty(maps.shape), *(weight.new_empty(weight.shape) for weight in weights)]


def _whole(weights: list[Any], kinds: list[bool]) -> Weights:
    """All weights by name, out of those that there are: with expansion, with a last norm."""
    expands, ends = kinds
    some = iter(weights)
    there: list[Any] = [next(some) if exists else None for exists in [expands] * 3 + [True] * 6 + [ends] * 2]
    return Weights(*there)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    maps, *weights, ctx.eps, ctx.factor = inputs
    ctx.kinds = [weights[0] is not None, weights[-1] is not None]
    ctx.save_for_backward(maps, *output[1:], *(weight for weight in weights if weight is not None))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 14
    maps, reduced, *saved = ctx.saved_tensors
    count = len(Moments._fields)
    grads = _backward(grad, maps, reduced, saved[:count], saved[count:], ctx.kinds, ctx.eps, ctx.factor)
    return grads[0], *_whole(grads[1:], ctx.kinds), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def official_refine_training_triton(
    maps: Tensor, weights: Weights, eps: list[float], factor: float
) -> tuple[Tensor, Moments]:
    """`official_refine_training` of maps in half or single precision, all in their type."""
    out, _reduced, *moments = _forward(rows_contiguous(maps), *weights, eps, factor)
    return out, Moments(*moments)
