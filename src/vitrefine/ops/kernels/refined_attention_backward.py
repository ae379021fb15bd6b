"""The backward pass of refined attention: P and dA* again, a chunk at a time, each read by one kernel a gradient."""

import torch
from torch import Tensor

from vitrefine.ops.kernels.aggregate_maps import grad_values
from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_grad_bias import bind_grad_bias
from vitrefine.ops.kernels.refined_attention_grad_keys import bind_grad_keys
from vitrefine.ops.kernels.refined_attention_grad_mix import bind_grad_mix, fold_mix
from vitrefine.ops.kernels.refined_attention_grad_scores import bind_grad_scores
from vitrefine.ops.kernels.refined_attention_grad_values import bind_grad_values
from vitrefine.ops.kernels.refined_attention_maps import RefinedGrads, bind_maps
from vitrefine.ops.kernels.refined_attention_plan import BACKWARD_SHARE, MIX_PROGRAMS
from vitrefine.ops.kernels.shapes import cdiv, rows_contiguous

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def values_by_chunk(kept: Tensor, dropout_p: float) -> bool:
    """Whether dV is taken a chunk at a time. Kept maps give it at once, unless it was others that were aggregated."""
    return not kept.numel() or dropout_p > 0


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, mask: Tensor | None, *, mask_grad: bool) -> Gradients:
    """What `differentiate` returns, unfilled."""
    dmask = mask.new_empty(mask.shape) if mask_grad and mask is not None else q.new_empty((0,))
    dq, dk, dv = (torch.empty_like(rows_contiguous(t)) for t in (q, k, v))
    return dq, dk, dv, mix.new_empty(mix.shape), dmask


def differentiate(
    launch: Launcher,
    call: Call,
    grad: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    grad_kept: Tensor | None,
    *,
    by_chunk: bool,
    mask_grad: bool,
) -> Gradients:
    """Gradients of q, k, v, the mix, and the additive mask (empty unless `mask_grad`).

    Args:
        launch: For this call.
        call: The inputs.
        grad: Of the output.
        results: All but the output of the forward pass: log-sum-exp, packed mix, refined maps.
        grad_kept: Of the refined maps, where there is one.
        by_chunk: See `values_by_chunk`.
        mask_grad: Whether the mask has a gradient.
    """
    lse, packed, kept = results
    q, k, v, _mix, mask, _out_mask = call.inputs
    tiles = call.tiles
    work, of = call.cut(3, "grad_scores", BACKWARD_SHARE)
    maps, grad_refined, grad_maps = q.new_empty(3, of.values())
    seen_keys = q.new_empty(of.images * call.heads * of.rows * call.dim, dtype=torch.float32)
    delta = torch.empty_like(lse)
    mix_rows = call.size + 1
    partial = q.new_empty((MIX_PROGRAMS, mix_rows, call.window["SPAN"], 4 * call.padded_heads), dtype=torch.float32)
    by_rows = work[0].last_out < call.n_queries  # then several chunks add to the gradient of a key
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(t, dtype=torch.float32) if by_rows else torch.empty_like(t) for t in (k, v))
    if not by_chunk:
        dv = grad_values(launch, grad, kept, v)
    dmask = q.new_empty(0)
    if mask_grad and mask is not None:
        dmask = q.new_zeros((mask.shape[0], call.heads, call.n_queries, call.n_keys), dtype=torch.float32)
    alone = dmask.shape[0] != 1  # a mask for each image, not one for all

    write_maps = bind_maps(launch, call, of, lse, maps, RefinedGrads(grad, grad_kept, grad_refined, seen_keys))
    mix_first, mix_next = bind_grad_mix(launch, call, of, grad_refined, maps, partial)
    to_scores = bind_grad_scores(launch, call, of, grad_refined, maps, grad_maps, packed, seen_keys, delta, dq)
    to_keys = bind_grad_keys(launch, call, of, maps, grad_maps, delta, dk, add=by_rows)
    to_values = bind_grad_values(launch, call, of, maps, packed, grad, dv, add=by_rows)
    to_bias = bind_grad_bias(launch, call, maps, grad_maps, delta, dmask, alone=alone)
    row_tiles = cdiv(of.rows, tiles["maps_backward"].rows)
    key_tiles = {name: cdiv(call.n_keys, tiles[name].keys) for name in ("grad_keys", "grad_values", "grad_bias")}
    for index, chunk in enumerate(work):
        images, out_rows = chunk.images, chunk.last_out - chunk.first_out
        place = chunk.first_image, chunk.first_out, chunk.last_out
        write_maps((row_tiles, images, 2), chunk.first_image, chunk.first_out - call.pad)
        to_mix = mix_next if index else mix_first
        to_mix((MIX_PROGRAMS, mix_rows, 1), out_rows, of.rows, of.width, images)
        to_scores((cdiv(out_rows, tiles["grad_scores"].rows), images, 1), *place)
        to_keys((key_tiles["grad_keys"], images, 1), *place)
        if by_chunk:
            to_values((key_tiles["grad_values"], images, 1), *place)
        if dmask.numel():
            bias_tiles = cdiv(out_rows, tiles["grad_bias"].rows), key_tiles["grad_bias"], images if alone else 1
            to_bias(bias_tiles, *place, of.rows, of.width, 1 if alone else images)
    if mask is not None and dmask.numel():
        dmask = dmask.sum_to_size(mask.shape).to(mask.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), fold_mix(launch, call, partial), dmask
