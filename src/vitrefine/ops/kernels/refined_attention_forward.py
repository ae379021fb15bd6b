"""The forward pass of refined attention: the log-sum-exp of all rows, then maps and output a chunk at a time."""

import torch
from torch import Tensor

from vitrefine.ops.aligned_maps import empty_maps
from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.refined_attention_aggregate import bind_aggregate
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_maps import bind_maps
from vitrefine.ops.kernels.refined_attention_norm import write_norm
from vitrefine.ops.kernels.refined_attention_plan import FORWARD_SHARE, span
from vitrefine.ops.kernels.shapes import cdiv, padded

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def empty_results(q: Tensor, k: Tensor, mix: Tensor, *, keep: bool) -> Results:
    """Output, log-sum-exp, packed mix and refined maps.

    Returns:
        Output (B, G, Nq, d), laid out as (B, Nq, G, d); log2-sum-exp (B, H, Nq) of the scores; the mix as the kernels
        read it; the refined maps (B, G, Nq, Nk) before dropout, empty unless `keep`.
    """
    batch, heads, n_queries, dim = q.shape
    n_mixed, size = mix.shape[0], mix.shape[-1]
    maps = padded(max(heads, n_mixed))
    out = q.new_empty((batch, n_queries, n_mixed, dim)).transpose(1, 2)
    lse = q.new_empty((batch, heads, n_queries), dtype=torch.float32)
    packed = q.new_empty((3, (size + 1) * span(size, maps), 4 * maps))
    kept = empty_maps(q, batch, n_mixed, n_queries, k.shape[2]) if keep else q.new_empty(0)
    return out, lse, packed, kept


def attend(launch: Launcher, call: Call, *, keep: bool) -> Results:
    """`empty_results`, filled."""
    out, lse, packed, kept = empty_results(call.q, call.k, call.mix, keep=keep)
    write_norm(launch, call, packed, lse)
    work, of = call.cut(1, "aggregate", FORWARD_SHARE)
    maps = call.q.new_empty(of.values())
    write_maps = bind_maps(launch, call, of, lse, maps)
    aggregate = bind_aggregate(launch, call, of, maps, packed, out, kept, keep=keep)
    row_tiles = cdiv(of.rows, call.tiles["maps"].rows)
    for chunk in work:
        write_maps((row_tiles, chunk.images, 1), chunk.first_image, chunk.first_out - call.pad)
        out_tiles = cdiv(chunk.last_out - chunk.first_out, call.tiles["aggregate"].rows)
        aggregate((out_tiles, chunk.images, 1), chunk.first_image, chunk.first_out, chunk.last_out)
    return out, lse, packed, kept
