"""Backward: the gradient of the keys."""

import triton
import triton.language as tl

from vitrefine.ops.kernels.refined_attention_blocks import load_heads, store_heads


@triton.jit(
    do_not_specialize=["first_image", "first_out", "last_out", "n_rows", "width", "n_heads", "n_queries", "n_keys"]
)
def grad_keys_kernel(
    maps,
    grad_maps,
    delta,
    q,
    dk,
    q_image,
    q_head,
    q_token,
    dk_image,
    dk_head,
    dk_token,
    first_image,
    first_out,
    last_out,
    n_rows,
    width,
    n_heads,
    n_queries,
    n_keys,
    dim,
    scale,
    PAD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
        p = tl.load(maps + place, mask=exists, other=0.0).to(tl.float32)
        dp = tl.load(grad_maps + place, mask=exists, other=0.0).to(tl.float32)
        row_sum = tl.load(
            delta + (image * n_heads + heads[None, :]) * n_queries + rows[:, None],
            mask=(heads < n_heads)[None, :] & (rows < last_out)[:, None],
            other=0.0,
        )
        ds = (p * (dp - row_sum[:, None, :])).to(q.dtype.element_ty)
        queries = load_heads(q + image * q_image, q_head, q_token, heads, rows, n_heads, last_out, dim, DIM)
        result = tl.dot(tl.permute(ds, (2, 1, 0)), queries, result, input_precision=PRECISION)
    store_heads(
        dk + image * dk_image, dk_head, dk_token, result * scale, heads, columns, n_heads, n_keys, dim, DIM, ADD
    )
