"""Deformable merging as one differentiable operator that keeps no sampled map, its backward pass without atomics.

With S the (tokens, taps·C) samples of the map, W the weights and O = S Wᵀ:

    forward    S, then O                                                          (`sample_kernel`, then the library)
    backward   dS = dO W; S again, dW = dOᵀ S                                     (the same)
               d offset: dS times the differences between corners                 (`sample_kernel`)
               dX(p) = Σ over the taps that read pixel p of bilinear weight · dS  (`collect_kernel`)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.kernels.deformable_merge_collect import collect, count_cells
from vitrefine.ops.kernels.deformable_merge_sample import Geometry, sample
from vitrefine.ops.kernels.launch import Launcher, on_its_device


def _packed(weight: Tensor) -> Tensor:
    """(C_out, taps·C): as a token's samples lie."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def _dense(offset: Tensor) -> Tensor:
    """Offsets whose gradient can have the same strides: not expanded, say."""
    return offset if offset.is_contiguous(memory_format=torch.channels_last) else offset.contiguous()


@torch.library.custom_op("vitrefine::deformable_merge", mutates_args=())
@on_its_device
def _forward(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    x, packed = x.contiguous(), _packed(weight)
    samples = x.new_empty((x.shape[0], *offset.shape[2:], packed.shape[1]))
    launch = Launcher("deformable_merge", [x, offset, weight], *geometry)
    sample(launch, x, offset, weight, geometry, samples)
    return F.linear(samples, packed, bias)


@torch.library.custom_op("vitrefine::deformable_merge_backward", mutates_args=())
@on_its_device
def _backward(
    grad: Tensor, x: Tensor, offset: Tensor, weight: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the map, the offsets and the weights."""
    x, offset, grad, packed = x.contiguous(), _dense(offset), grad.reshape(-1, weight.shape[0]), _packed(weight)
    batch, height, width, n_channels = x.shape
    n_taps = offset[0, 0].numel() * weight[0, 0].numel()

    grad_samples = grad @ packed
    samples, grad_offset = torch.empty_like(grad_samples), torch.empty_like(offset)
    points = x.new_empty((batch * n_taps, 2), dtype=torch.float32)
    cells = x.new_empty((batch, n_taps), dtype=torch.int16 if count_cells(height, width) < 2**15 else torch.int32)
    launch = Launcher("deformable_merge_backward", [x, offset, weight], *geometry)
    sample(launch, x, offset, weight, geometry, samples, (grad_samples, grad_offset, points, cells))
    grad_weight = (grad.T @ samples).view(-1, *weight.shape[2:], n_channels).permute(0, 3, 1, 2).contiguous()
    return collect(launch, x, grad_samples, points, cells), grad_offset, grad_weight


@_forward.register_fake
def _(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    return x.new_empty((x.shape[0], *offset.shape[2:], weight.shape[0]))


@_backward.register_fake
def _(grad: Tensor, x: Tensor, offset: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(_dense(offset)), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, offset, weight, bias, ctx.geometry = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, offset, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    # In two steps: the library sums over everything at once with too few threads.
    grad_bias = grad.sum((1, 2), dtype=torch.float32).sum(0).to(grad.dtype) if ctx.has_bias else None
    return *_backward(grad, *ctx.saved_tensors, ctx.geometry), grad_bias, None


_forward.register_autograd(_differentiate, setup_context=_save)


def deformable_merge_triton(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """`deformable_merge` without groups: nothing is kept for the backward pass but the inputs.

    Args:
        x: Map, (B, H, W, C); float16, bfloat16 or float32.
        offset: Displacements in pixels, (B, 2·taps, h, w), in any of these types.
        weight: (C_out, C, kernel, kernel), in the type of the map.
        bias: (C_out,).
        stride: Pixels from one window to the next; the kernel's size if None.
        padding: Pixels by which the first window lies outside.
        dilation: Pixels from one tap to the next.

    Returns:
        (B, h, w, C_out).
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if x.dtype not in kinds or weight.dtype != x.dtype or offset.dtype not in kinds:
        raise UserError(
            f"the merging kernel takes a map and weights of one type, half or single precision, not {x.dtype} and "
            f"{weight.dtype} with offsets in {offset.dtype}; cast them or use impl='reference'"
        )
    taps = weight.shape[2] * weight.shape[3]
    if offset.shape[:2] != (x.shape[0], 2 * taps):
        raise UserError(
            f"{x.shape[0]} maps merged by {taps} taps need offsets of ({x.shape[0]}, {2 * taps}, …), not "
            f"{tuple(offset.shape)}"
        )
    if weight.shape[1] != x.shape[-1]:
        raise UserError(
            f"the merging kernel mixes all channels, but a map of {x.shape[-1]} meets weights of {weight.shape[1]}; "
            "use impl='reference' for groups"
        )
    pairs = (tuple(weight.shape[2:]) if stride is None else stride, padding, dilation)
    geometry = [length for pair in pairs for length in ((pair, pair) if isinstance(pair, int) else pair)]
    return _forward(x, offset, weight, bias, geometry)
