"""Refined attention as one differentiable operator whose N×N maps exist only a chunk at a time.

    O_g(i) = Σ_j A*_g(i, j) V_g(j),   A*_g(i, j) = Σ_h,a,b M[g, h, a, b] P_h(i + a, j + b),   P = softmax(q kᵀ · scale)

Forward: `norm_kernel` finds the log-sum-exp of each row, which is all that is kept; then, a chunk at a time,
`maps_kernel` writes P and `aggregate_kernel` convolves it and multiplies by V. Backward: P and dA* are written again,
a chunk at a time, and read by one kernel a gradient. Sums are taken in a fixed order: same inputs, same bits.

Where later blocks use A* again it is kept as a whole, a second result of the operator, and the gradient that comes back
for it is added to dA*.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.aligned_maps import empty_maps
from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.refined_attention_aggregate import aggregate_kernel
from vitrefine.ops.kernels.refined_attention_blocks import ADDITIVE, BOOLEAN, UNMASKED
from vitrefine.ops.kernels.refined_attention_grad_bias import grad_bias_kernel
from vitrefine.ops.kernels.refined_attention_grad_keys import grad_keys_kernel
from vitrefine.ops.kernels.refined_attention_grad_mix import fold_mix_kernel, grad_mix_kernel
from vitrefine.ops.kernels.refined_attention_grad_scores import grad_scores_kernel
from vitrefine.ops.kernels.refined_attention_grad_values import grad_values_kernel
from vitrefine.ops.kernels.refined_attention_maps import maps_kernel
from vitrefine.ops.kernels.refined_attention_norm import norm_kernel
from vitrefine.ops.kernels.refined_attention_plan import (
    BACKWARD_SHARE,
    FORWARD_SHARE,
    MIX_PROGRAMS,
    buffer,
    cdiv,
    chunks,
    padded,
    span,
    tiles_for,
    windows,
)
from vitrefine.ops.refined_attention import visible_pairs

MAX_HEADS, MAX_SIZE, MAX_DIM = 32, 5, 128
MAX_TOKEN_BYTES = 4096  # all heads of a token, padded: more does not fit the shared memory of a multiprocessor


class _Mask(NamedTuple):
    """A mask as a kernel takes it: a pointer (to anything, where there is no mask), strides, and its kind."""

    values: Tensor
    strides: tuple[int, ...]
    kind: int

    @classmethod
    def of(cls, mask: Tensor | None, stand_in: Tensor) -> "_Mask":
        if mask is None:
            return cls(stand_in, (0, 0, 0, 0), UNMASKED)
        strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
        if mask.dtype == torch.bool:
            return cls(mask.view(torch.uint8), strides, BOOLEAN)
        return cls(mask, strides, ADDITIVE)


def _packed_shape(size: int, heads: int) -> tuple[int, ...]:
    return 3, (size + 1) * span(size, heads), 4 * heads


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


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
    """Output, log-sum-exp, packed mix and refined maps.

    Returns:
        Output (B, G, Nq, d), laid out as (B, Nq, G, d); log2-sum-exp (B, H, Nq) of the scores; the mix as the kernels
        read it; the refined maps (B, G, Nq, Nk) before dropout, empty unless `keep`.
    """
    q, k, v, mix = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v), mix.contiguous()
    batch, heads, n_queries, dim = q.shape
    n_keys, n_mixed, size = k.shape[2], mix.shape[0], mix.shape[-1]
    maps_padded = padded(max(heads, n_mixed))
    width, precision = padded(dim), product_precision(q.dtype)
    tiles = tiles_for(maps_padded, width, q.element_size(), masked=mask is not None)
    launch = Launcher("forward", [q, k, v, mix, mask, out_mask], precision, dropout_p > 0, keep)
    common = {"HEADS": maps_padded, "DIM": width, "PRECISION": precision}
    window = {"SIZE": size, "SPAN": span(size, maps_padded)}
    masked, out_masked = _Mask.of(mask, q), _Mask.of(out_mask, q)
    drawn = q if seed is None else seed

    out = q.new_empty((batch, n_queries, n_mixed, dim)).transpose(1, 2)
    lse = q.new_empty((batch, heads, n_queries), dtype=torch.float32)
    packed = q.new_empty(_packed_shape(size, maps_padded))
    kept = empty_maps(q, batch, n_mixed, n_queries, n_keys) if keep else q.new_empty(0)
    launch(
        norm_kernel,
        (cdiv(n_queries, tiles["norm"].rows), batch * heads, 1),
        *(q, k, masked.values, mix, packed, lse),
        *(*q.stride()[:3], *k.stride()[:3], *masked.strides),
        *(heads, n_mixed, n_queries, n_keys, dim, scale),
        MASK=masked.kind,
        **common,
        **window,
        **tiles["norm"].options(),
    )
    work = chunks(
        batch, n_queries, n_keys, size, maps_padded, q.element_size(), tiles["aggregate"], FORWARD_SHARE * q.nbytes
    )
    of = buffer(work[0].last_out, n_keys, size, maps_padded)
    maps = q.new_empty(work[0].images * of.rows * of.width * maps_padded)
    seen = windows(maps, work[0].images, of, n_keys, size, tiles["aggregate"])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    write_maps = launch.bind(
        maps_kernel,
        (
            *(q, k, v, q, q, masked.values, out_masked.values, drawn, lse, maps, maps, lse),
            *(*strides, *q.stride()[:3], 0, 0, 0, *masked.strides, *out_masked.strides),
        ),
        (of.rows, of.width, heads, n_mixed, n_queries, n_keys, dim, scale, dropout_p),
        MASK=masked.kind,
        OUT_MASK=out_masked.kind,
        DROPOUT=dropout_p > 0,
        KEPT=False,
        PAD=size // 2,
        BACKWARD=False,
        **common,
        **tiles["maps"].options(),
    )
    aggregate = launch.bind(
        aggregate_kernel,
        (
            *(seen, packed, v, out_masked.values, drawn, out, kept, *v.stride()[:3], *out.stride()[:3]),
            *(*(kept.stride()[:3] if keep else (0, 0, 0)), *out_masked.strides),
        ),
        (of.rows, n_mixed, n_queries, n_keys, dim, dropout_p),
        OUT_MASK=out_masked.kind,
        DROPOUT=dropout_p > 0,
        KEEP=keep,
        **common,
        **window,
        **tiles["aggregate"].options(),
    )
    row_tiles = cdiv(of.rows, tiles["maps"].rows)
    for chunk in work:
        write_maps((row_tiles, chunk.images, 1), chunk.first_image, chunk.first_out - size // 2)
        out_tiles = cdiv(chunk.last_out - chunk.first_out, tiles["aggregate"].rows)
        aggregate((out_tiles, chunk.images, 1), chunk.first_image, chunk.first_out, chunk.last_out)
    return out, lse, packed, kept


@_forward.register_fake
def _(
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
    batch, heads, n_queries, dim = q.shape
    out = q.new_empty((batch, n_queries, mix.shape[0], dim)).transpose(1, 2)
    lse = q.new_empty((batch, heads, n_queries), dtype=torch.float32)
    packed = q.new_empty(_packed_shape(mix.shape[-1], padded(max(heads, mix.shape[0]))))
    kept = empty_maps(q, batch, mix.shape[0], n_queries, k.shape[2]) if keep else q.new_empty(0)
    return out, lse, packed, kept


def _values_by_kernel(kept: Tensor, dropout_p: float) -> bool:
    """Whether dV needs a kernel. Kept maps give it by one product, unless other maps than those were aggregated."""
    return not kept.numel() or dropout_p > 0


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
    grad, q, k, v = _rows_contiguous(grad), _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, heads, n_queries, dim = q.shape
    n_keys, n_mixed, size = k.shape[2], mix.shape[0], mix.shape[-1]
    maps_padded = padded(max(heads, n_mixed))
    width, precision = padded(dim), product_precision(q.dtype)
    tiles = tiles_for(maps_padded, width, q.element_size(), masked=mask is not None)
    grad_kept = None if grad_kept is None else _rows_contiguous(grad_kept)
    by_kernel = _values_by_kernel(kept, dropout_p)
    launch = Launcher("backward", [grad, q, k, v, mix, mask, out_mask, grad_kept], precision, dropout_p > 0, by_kernel)
    common = {"HEADS": maps_padded, "PRECISION": precision}
    window = {"SIZE": size, "SPAN": span(size, maps_padded)}
    masked, out_masked = _Mask.of(mask, q), _Mask.of(out_mask, q)
    drawn = q if seed is None else seed

    item = 3 * q.element_size()
    work = chunks(batch, n_queries, n_keys, size, maps_padded, item, tiles["grad_scores"], BACKWARD_SHARE * q.nbytes)
    images = work[0].images
    of = buffer(work[0].last_out, n_keys, size, maps_padded)
    maps, grad_refined, grad_maps = q.new_empty(3, images * of.rows * of.width * maps_padded)
    seen_maps = windows(maps, images, of, n_keys, size, tiles["grad_values"])
    seen_grads = [windows(grad_refined, images, of, n_keys, size, tiles[name]) for name in ("grad_mix", "grad_scores")]
    seen_keys = q.new_empty(images * heads * of.rows * dim, dtype=torch.float32)
    delta = torch.empty_like(lse)
    partial = q.new_empty((MIX_PROGRAMS, size + 1, window["SPAN"], 4 * maps_padded), dtype=torch.float32)
    by_rows = work[0].last_out < n_queries  # then several chunks add to the gradient of a key
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(t, dtype=torch.float32) if by_rows else torch.empty_like(t) for t in (k, v))
    if not by_kernel:
        dv = kept.mT @ grad
    dmask = q.new_empty(0)
    if mask_grad and mask is not None:
        dmask = q.new_zeros((mask.shape[0], heads, n_queries, n_keys), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    given, kept_strides = (q, (0, 0, 0)) if grad_kept is None else (grad_kept, grad_kept.stride()[:3])
    dropping = {"OUT_MASK": out_masked.kind, "DROPOUT": dropout_p > 0}
    write_maps = launch.bind(
        maps_kernel,
        (
            *(q, k, v, grad, given, masked.values, out_masked.values, drawn, lse, maps, grad_refined, seen_keys),
            *(*strides, *kept_strides, *masked.strides, *out_masked.strides),
        ),
        (of.rows, of.width, heads, n_mixed, n_queries, n_keys, dim, scale, dropout_p),
        MASK=masked.kind,
        KEPT=grad_kept is not None,
        DIM=width,
        PAD=size // 2,
        BACKWARD=True,
        **dropping,
        **common,
        **tiles["maps_backward"].options(),
    )
    mix_first, mix_next = (
        launch.bind(
            grad_mix_kernel,
            (seen_grads[0], maps, partial),
            (n_keys,),
            ADD=add,
            **common,
            **window,
            **tiles["grad_mix"].options(),
        )
        for add in (False, True)
    )
    to_scores = launch.bind(
        grad_scores_kernel,
        (seen_grads[1], maps, grad_maps, packed, k, seen_keys, delta, dq, *k.stride()[:3], *dq.stride()[:3]),
        (of.rows, of.width, heads, n_queries, n_keys, dim, scale),
        DIM=width,
        **common,
        **window,
        **tiles["grad_scores"].options(),
    )
    to_keys = launch.bind(
        grad_keys_kernel,
        (maps, grad_maps, delta, q, dk, *q.stride()[:3], *dk.stride()[:3]),
        (of.rows, of.width, heads, n_queries, n_keys, dim, scale),
        DIM=width,
        ADD=by_rows,
        PAD=size // 2,
        **common,
        **tiles["grad_keys"].options(),
    )
    to_values = launch.bind(
        grad_values_kernel,
        (
            *(seen_maps, packed, grad, out_masked.values, drawn, dv),
            *(*grad.stride()[:3], *dv.stride()[:3], *out_masked.strides),
        ),
        (of.rows, n_mixed, n_queries, n_keys, dim, dropout_p),
        DIM=width,
        ADD=by_rows,
        **dropping,
        **common,
        **window,
        **tiles["grad_values"].options(),
    )
    alone = dmask.shape[0] != 1  # a mask for each image, not one for all
    to_bias = launch.bind(
        grad_bias_kernel,
        (maps, grad_maps, delta, dmask, dmask.stride(0) if alone else 0),
        (heads, n_queries, n_keys),
        PAD=size // 2,
        HEADS=maps_padded,
        **tiles["grad_bias"].options(),
    )
    row_tiles = cdiv(of.rows, tiles["maps_backward"].rows)
    key_tiles = {name: cdiv(n_keys, tiles[name].keys) for name in ("grad_keys", "grad_values", "grad_bias")}
    for index, chunk in enumerate(work):
        images, out_rows = chunk.images, chunk.last_out - chunk.first_out
        place = chunk.first_image, chunk.first_out, chunk.last_out
        write_maps((row_tiles, images, 2), chunk.first_image, chunk.first_out - size // 2)
        to_mix = mix_next if index else mix_first
        to_mix((MIX_PROGRAMS, size + 1, 1), out_rows, of.rows, of.width, images)
        to_scores((cdiv(out_rows, tiles["grad_scores"].rows), images, 1), *place)
        to_keys((key_tiles["grad_keys"], images, 1), *place)
        if by_kernel:
            to_values((key_tiles["grad_values"], images, 1), *place)
        if dmask.numel():
            bias_tiles = cdiv(out_rows, tiles["grad_bias"].rows), key_tiles["grad_bias"], images if alone else 1
            to_bias(bias_tiles, *place, of.rows, of.width, 1 if alone else images)
    dmix = torch.empty_like(mix, memory_format=torch.contiguous_format)
    launch(fold_mix_kernel, (size, size, 1), partial.sum(0), dmix, n_mixed, heads, HEADS=maps_padded, **window)
    if mask is not None and dmask.numel():
        dmask = dmask.sum_to_size(mask.shape).to(mask.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dmix, dmask


@_backward.register_fake
def _(
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
    dmask = mask.new_empty(mask.shape) if mask_grad and mask is not None else q.new_empty((0,))
    dq, dk, dv = (torch.empty_like(_rows_contiguous(t)) for t in (q, k, v))
    if not _values_by_kernel(kept, dropout_p):
        dv = v.new_empty(v.shape)
    return dq, dk, dv, mix.new_empty(mix.shape), dmask


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
    seed = torch.randint(2**31, (1,), device=q.device) if dropout_p > 0 else None
    out, _, _, kept = torch.ops.vitrefine.refined_attention(
        q, k, v, mix, mask, out_mask, seed, dropout_p, dim**-0.5 if scale is None else scale, keep
    )
    return out, kept
