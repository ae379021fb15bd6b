"""The log-sum-exp of each row of scores: the first step of the forward pass, and all that is kept of the maps."""

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.refined_attention_blocks import pack_mix
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_mask import load_mask
from vitrefine.ops.kernels.shapes import cdiv


@triton.jit(do_not_specialize=["n_heads", "n_mixed", "n_queries", "n_keys"])
def norm_kernel(
    q, k, mask, mix, packed, lse, q_image, q_head, q_token, k_image, k_head, k_token, mask_image, mask_head, mask_row,
    mask_column, n_heads, n_mixed, n_queries, n_keys, dim, scale, MASK: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """log2 Σ_j exp(q·k · scale + mask) of ROWS queries of one head; all programs together also pack the mix."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    pack_mix(mix, packed, program, tl.num_programs(0) * tl.num_programs(1), n_mixed, n_heads, SIZE, HEADS, SPAN)
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, DIM)
    queries = tl.load(
        q + image * q_image + head * q_head + rows[:, None] * q_token + channels[None, :],
        mask=(rows < n_queries)[:, None] & (channels < dim)[None, :],
        other=0.0,
    )
    k += image * k_image + head * k_head
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n_keys, KEYS):
        columns = start + tl.arange(0, KEYS)
        keys = tl.load(
            k + columns[:, None] * k_token + channels[None, :],
            mask=(columns < n_keys)[:, None] & (channels < dim)[None, :],
            other=0.0,
        )
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * 1.4426950408889634)
        if MASK:
            s += 1.4426950408889634 * load_mask(
                mask + image * mask_image, mask_head, mask_row, mask_column, head, rows[:, None], columns[None, :],
                n_heads, n_queries, n_keys, MASK,
            )  # fmt: skip
        else:
            s = tl.where((columns < n_keys)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(s - base[:, None]), axis=1)
        top = higher
    # A row without a visible key gets weights of zero by an infinite log-sum-exp.
    norm = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * n_queries + rows, norm, mask=rows < n_queries)


def write_norm(launch: Launcher, call: Call, packed: Tensor, lse: Tensor) -> None:
    """Fill `packed` with the mix in three forms, and `lse`, (B, H, Nq)."""
    tile, q, k, mask = call.tiles["norm"], call.q, call.k, call.mask
    launch(
        norm_kernel,
        (cdiv(call.n_queries, tile.rows), call.batch * call.heads, 1),
        *(q, k, mask.values, call.mix, packed, lse),
        *(*q.stride()[:3], *k.stride()[:3], *mask.strides),
        *(call.heads, call.n_mixed, call.n_queries, call.n_keys, call.dim, call.scale),
        MASK=mask.kind,
        DIM=call.padded_dim,
        **call.products,
        **call.window,
        **tile.options(),
    )
