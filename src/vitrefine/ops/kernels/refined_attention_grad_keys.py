"""Backward: the gradient of the keys."""

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Bound, Launcher
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_plan import Buffer
from vitrefine.ops.kernels.refined_attention_tiles import load_heads, load_score_grads, store_heads


@triton.jit(
    do_not_specialize=["first_image", "first_out", "last_out", "n_rows", "width", "n_heads", "n_queries", "n_keys"]
)
def grad_keys_kernel(
    maps, grad_maps, delta, q, dk, q_image, q_head, q_token, dk_image, dk_head, dk_token, first_image, first_out,
    last_out, n_rows, width, n_heads, n_queries, n_keys, dim, scale, PAD: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK = dSᵀ Q · scale, dS = P (dP - δ), from rows first_out … last_out."""
    slot = tl.program_id(1).to(tl.int64)
    image = first_image + slot
    maps += slot * n_rows * width * HEADS
    grad_maps += slot * n_rows * width * HEADS
    heads = tl.arange(0, HEADS)
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    result = tl.zeros((HEADS, KEYS, DIM), tl.float32)
    # Not pipelined: asynchronous copies would land in an order that is read back two bytes at a time.
    for start_row in tl.range(first_out, last_out, ROWS, num_stages=1):
        rows = start_row + tl.arange(0, ROWS)
        pixels = (rows - first_out + PAD)[:, None] * width + columns[None, :] + PAD
        exists = ((rows < last_out)[:, None] & (columns < n_keys)[None, :])[:, :, None]
        place = pixels[:, :, None] * HEADS + heads[None, None, :]
        ds = load_score_grads(
            maps, grad_maps, delta, place, exists, image, heads, rows, n_heads, n_queries, last_out
        ).to(q.dtype.element_ty)
        queries = load_heads(q + image * q_image, q_head, q_token, heads, rows, n_heads, last_out, dim, DIM)
        result = tl.dot(tl.permute(ds, (2, 1, 0)), queries, result, input_precision=PRECISION)
    store_heads(
        dk + image * dk_image, dk_head, dk_token, result * scale, heads, columns, n_heads, n_keys, dim, DIM, ADD
    )


def bind_grad_keys(
    launch: Launcher, call: Call, of: Buffer, maps: Tensor, grad_maps: Tensor, delta: Tensor, dk: Tensor, *, add: bool
) -> Bound:
    """To be launched over (tiles of keys, images) of a chunk, with its first image, first row and last row."""
    return launch.bind(
        grad_keys_kernel,
        (maps, grad_maps, delta, call.q, dk, *call.q.stride()[:3], *dk.stride()[:3]),
        (of.rows, of.width, call.heads, call.n_queries, call.n_keys, call.dim, call.scale),
        DIM=call.padded_dim,
        ADD=add,
        PAD=call.pad,
        **call.products,
        **call.tiles["grad_keys"].options(),
    )
