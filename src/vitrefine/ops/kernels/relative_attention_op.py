"""Relative attention as one differentiable operator that never holds the (H, N, N) bias.

    O_h = softmax(Q_h K_hᵀ · scale + B_h) V_h,   B_h(i, j) = table_h(row_i - row_j + h - 1, column_i - column_j + w - 1)

Kernels read strips of the bias (`relative_attention_tiles`), 2/h of it. The log-sum-exp of each row is all that is kept
for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.relative_attention_call import Call
from vitrefine.ops.kernels.relative_attention_forward import attend, empty_results
from vitrefine.ops.kernels.relative_attention_grad_inputs import grad_inputs
from vitrefine.ops.kernels.relative_attention_grad_table import grad_table
from vitrefine.ops.kernels.shapes import rows_contiguous

MAX_DIM = 128


@torch.library.custom_op("vitrefine::relative_attention", mutates_args=())
@on_its_device
def _forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, d), laid out as (B, N, H, d), and log2-sum-exp (B, H, N)."""
    call = Call(q, k, v, table, width, scale)
    launch = Launcher("relative_attention", [*call.inputs[:3], table], width, call.constants["PRECISION"])
    return attend(launch, call)


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q)


@torch.library.custom_op("vitrefine::relative_attention_backward", mutates_args=())
@on_its_device
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    width: int,
    scale: float,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the table (empty unless `table_grad`)."""
    call, grad = Call(q, k, v, table, width, scale), rows_contiguous(grad)
    tensors = [grad, *call.inputs[:3], table, out]
    launch = Launcher("relative_attention_backward", tensors, width, call.constants["PRECISION"])
    grad_q, grad_k, grad_v, delta = grad_inputs(launch, call, grad, out, lse)
    if not table_grad:
        return grad_q, grad_k, grad_v, table.new_empty((0,))
    return grad_q, grad_k, grad_v, grad_table(launch, call, table, grad, lse, delta)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *others: Any) -> tuple[Tensor, ...]:
    grad_q, grad_k, grad_v = (q.new_empty(q.shape) for _ in range(3))
    return grad_q, grad_k, grad_v, table.new_empty(table.shape if others[-1] else (0,))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, strips, ctx.width, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, strips, *output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 6
    table_grad = bool(ctx.needs_input_grad[3])
    *grads, grad_table = _backward(grad, *ctx.saved_tensors, ctx.width, ctx.scale, table_grad)
    return *grads, grad_table if table_grad else None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def relative_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int, *, scale: float | None = None
) -> Tensor:
    """`relative_attention` without the (H, N, N) bias.

    Args:
        q: Queries, (B, H, N, d), d at most 128; half or single precision.
        k: Keys, (B, H, N, d).
        v: Values, (B, H, N, d).
        table: Bias of each head and displacement, (H, 2h-1, 2w-1), in any type.
        width: Of the map.
        scale: Factor of the scores; d^-½ if None.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if q.dtype not in kinds or q.shape[-1] > MAX_DIM:
        raise UserError(
            f"the relative attention kernel takes heads of at most {MAX_DIM} channels in half or single precision, "
            f"not {q.shape[-1]} in {q.dtype}; use impl='reference'"
        )
    return _forward(q, k, v, table, width, q.shape[-1] ** -0.5 if scale is None else scale)[0]
