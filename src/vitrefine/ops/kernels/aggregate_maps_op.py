"""Maps that another block made, times the values of this one, as a differentiable operator: O = A V."""

from typing import Any

import torch
from torch import Tensor

from vitrefine.ops.aligned_maps import empty_maps
from vitrefine.ops.kernels.aggregate_maps import empty_output, grad_maps, grad_values, output
from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.shapes import rows_contiguous

MAX_DIM = 128


@torch.library.custom_op("vitrefine::aggregate_maps", mutates_args=())
@on_its_device
def _forward(maps: Tensor, v: Tensor) -> Tensor:
    """(B, G, Nq, d), laid out as (B, Nq, G, d)."""
    v = rows_contiguous(v)
    return output(Launcher("aggregate_maps", [maps, v], product_precision(v.dtype)), maps, v)


@_forward.register_fake
def _(maps: Tensor, v: Tensor) -> Tensor:
    return empty_output(maps, v)


@torch.library.custom_op("vitrefine::aggregate_maps_backward", mutates_args=())
@on_its_device
def _backward(grad: Tensor, maps: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the maps and of the values."""
    grad, v = rows_contiguous(grad), rows_contiguous(v)
    launch = Launcher("aggregate_maps_backward", [grad, maps, v], product_precision(v.dtype))
    return grad_maps(launch, grad, v), grad_values(launch, grad, maps, v)


@_backward.register_fake
def _(grad: Tensor, maps: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return empty_maps(grad, *maps.shape), torch.empty_like(rows_contiguous(v))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_differentiate, setup_context=_save)


def aggregate_maps_triton(maps: Tensor, v: Tensor) -> Tensor:
    """`maps @ v`.

    Args:
        maps: (B, G, Nq, Nk), rows as in `empty_maps`.
        v: (B, G, Nk, d), d at most `MAX_DIM`.

    Returns:
        (B, G, Nq, d), laid out as (B, Nq, G, d).
    """
    return _forward(maps, v)
