"""Refined attention as one differentiable operator whose N×N maps exist only a chunk at a time.

    O_g(i) = Σ_j A*_g(i, j) V_g(j),   A*_g(i, j) = Σ_h,a,b M[g, h, a, b] P_h(i + a, j + b),   P = softmax(q kᵀ · scale)

Forward: `norm_kernel` finds the log-sum-exp of each row, which is all that is kept; then, a chunk at a time,
`maps_kernel` writes P and `aggregate_kernel` convolves it and multiplies by V. Backward: P and dA* are written again,
a chunk at a time, and read by one kernel a gradient. Sums are taken in a fixed order: same inputs, same bits.

Where later blocks use A* again it is kept as a whole, a second result of the operator, and the gradient that comes back
for it is added to dA*.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.refined_attention_backward import differentiate, empty_gradients, values_by_chunk
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_forward import attend, empty_results
from vitrefine.ops.kernels.refined_attention_pack import images_together, pack, spread, unpack
from vitrefine.ops.kernels.shapes import padded, rows_contiguous
from vitrefine.ops.refined_attention import visible_pairs

MAX_HEADS, MAX_SIZE, MAX_DIM = 32, 5, 128
MAX_TOKEN_BYTES = 4096  # all heads of a token, padded: more does not fit the shared memory of a multiprocessor


@torch.library.custom_op("vitrefine::refined_attention", mutates_args=())
@on_its_device
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    mask: Tensor | None,
    out_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, packed mix and refined maps; see `empty_results`."""
    call = Call(q, k, v, mix.contiguous(), mask, out_mask, seed, dropout_p, scale)
    launch = Launcher("forward", call.inputs, call.precision, dropout_p > 0, keep)
    return attend(launch, call, keep=keep)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return empty_results(q, k, mix, keep=others[-1])


@torch.library.custom_op("vitrefine::refined_attention_backward", mutates_args=())
@on_its_device
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    mask: Tensor | None,
    out_mask: Tensor | None,
    seed: Tensor | None,
    lse: Tensor,
    packed: Tensor,
    kept: Tensor,
    grad_kept: Tensor | None,
    dropout_p: float,
    scale: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the mix, and the additive mask (empty unless `mask_grad`).

    `kept` are the refined maps, where the forward pass kept them, and `grad_kept` their gradient, where there is one.
    """
    call, grad = Call(q, k, v, mix, mask, out_mask, seed, dropout_p, scale), rows_contiguous(grad)
    grad_kept = None if grad_kept is None else rows_contiguous(grad_kept)
    by_chunk = values_by_chunk(kept, dropout_p)
    launch = Launcher("backward", [grad, *call.inputs, grad_kept], call.precision, dropout_p > 0, by_chunk)
    results = lse, packed, kept
    return differentiate(launch, call, grad, results, grad_kept, by_chunk=by_chunk, mask_grad=mask_grad)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mix: Tensor, mask: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    return empty_gradients(q, k, v, mix, mask, mask_grad=others[-1])


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.dropout_p, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:3])


def _differentiate(ctx: Any, grad: Tensor | None, _: None, __: None, grad_kept: Tensor | None) -> tuple:
    if grad is None and grad_kept is None:
        return (None,) * 10
    q, _k, v, mix, mask = ctx.saved_tensors[:5]
    if grad is None:
        grad = v.new_zeros((q.shape[0], mix.shape[0], q.shape[2], v.shape[3]))
    mask_grad = bool(mask is not None and ctx.needs_input_grad[4])
    *grads, dmask = _backward(grad, *ctx.saved_tensors, grad_kept, ctx.dropout_p, ctx.scale, mask_grad)
    return *grads, dmask if mask_grad else None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def supported(maps: int, size: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take so many maps, a mix of that size and heads of that width."""
    token = padded(maps) * padded(dim) * dtype.itemsize
    return maps <= MAX_HEADS and size <= MAX_SIZE and dim <= MAX_DIM and token <= MAX_TOKEN_BYTES


def refined_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """`refined_attention` of a folded mix, in memory linear in the number of tokens.

    Args:
        q: Queries, (B, H, Nq, d).
        k: Keys, (B, H, Nk, d).
        v: Values, (B, H, Nk, d), or any number of heads that divides the G of the mix.
        mix: Folded kernel (G, H, k, k) of `Mix.fold()`; see `supported` for its limits.
        attn_mask: Boolean (True: visible) or additive, broadcastable to (B, H, Nq, Nk).
        dropout_p: Dropout of the refined maps.
        scale: Factor of the scores; d^-½ if None.

    Returns:
        (B, G, Nq, d).
    """
    return _attend(q, k, v, mix, attn_mask, dropout_p, scale, keep=False)[0]


def refined_attention_and_maps_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`refined_attention_triton`, and the refined maps (B, G, Nq, Nk) that it aggregated, before dropout."""
    out, maps = _attend(q, k, v, mix, attn_mask, dropout_p, scale, keep=True)
    return out, maps


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    heads, dim = q.shape[1], q.shape[-1]
    maps = max(heads, mix.shape[0])
    if not supported(maps, mix.shape[-1], dim, q.dtype):
        raise UserError(
            f"the Triton refined attention has no room for {maps} maps, a {mix.shape[-1]}×{mix.shape[-1]} kernel and "
            f"{dim} channels a head in {q.dtype}: use impl='collapsed'"
        )
    if mix.shape[-1] % 2 == 0:
        mix = F.pad(mix, (1, 0, 1, 0))  # an even kernel reaches further right and down; so does an odd one with zeros
    if v.shape[1] != mix.shape[0]:
        v = v.repeat_interleave(mix.shape[0] // v.shape[1], dim=1)
    mask = out_mask = None
    if attn_mask is not None:
        mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
        visible = visible_pairs(mask)
        if mask.dtype != torch.bool:
            mask = mask.masked_fill(~visible, float("-inf"))
        out_mask = mask if mask.shape[1] in (1, mix.shape[0]) else visible.any(dim=1, keepdim=True)
    batch, one_for_all = q.shape[0], mask is None or mask.shape[:2] == (1, 1)
    images = images_together(batch, maps, q.shape[2]) if one_for_all else 1
    if images > 1:
        q, k, v, mix = pack(q, images), pack(k, images), pack(v, images), spread(mix, images)
    seed = torch.randint(2**31, (1,), device=q.device) if dropout_p > 0 else None
    out, _, _, kept = torch.ops.vitrefine.refined_attention(
        q, k, v, mix, mask, out_mask, seed, dropout_p, dim**-0.5 if scale is None else scale, keep
    )
    if images > 1:
        out, kept = unpack(out, images, batch), unpack(kept, images, batch) if keep else kept
    return out, kept
