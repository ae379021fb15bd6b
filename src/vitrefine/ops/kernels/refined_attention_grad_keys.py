"""Backward: the gradients of the values and of the keys."""

import triton
import triton.language as tl

from vitrefine.ops.kernels.refined_attention_blocks import convolve, drop, load_heads, store_heads


@triton.jit(
    do_not_specialize=[
        "first_image",
        "first_out",
        "last_out",
        "n_rows",
        "width",
        "n_heads",
        "n_mixed",
        "n_queries",
        "n_keys",
    ]
)
def grad_keys_kernel(
    windows,
    maps,
    grad_maps,
    delta,
    packed,
    q,
    grad,
    out_mask,
    seed,
    dk,
    dv,
    q_image,
    q_head,
    q_token,
    grad_image,
    grad_head,
    grad_token,
    dk_image,
    dk_head,
    dk_token,
    dv_image,
    dv_head,
    dv_token,
    out_mask_image,
    out_mask_head,
    out_mask_row,
    out_mask_column,
    first_image,
    first_out,
    last_out,
    n_rows,
    width,
    n_heads,
    n_mixed,
    n_queries,
    n_keys,
    dim,
    scale,
    dropout_p,
    OUT_MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dV = A*ᵀ dO (program_id(2) = 0) or dK = dSᵀ Q · scale (1), from rows first_out … last_out."""
    slot = tl.program_id(1).to(tl.int64)
    image = first_image + slot
    maps += slot * n_rows * width * HEADS
    grad_maps += slot * n_rows * width * HEADS
    packed += (SIZE + 1) * SPAN * 4 * HEADS
    out_mask += image * out_mask_image
    heads = tl.arange(0, HEADS)
    start = tl.program_id(0) * KEYS
    columns = start + tl.arange(0, KEYS)
    result = tl.zeros((HEADS, KEYS, DIM), tl.float32)
    if tl.program_id(2) == 0:
        for start_row in range(first_out, last_out, ROWS):
            rows = start_row + tl.arange(0, ROWS)
            row_pair = (tl.program_id(1) * n_rows + start_row - first_out) // 2
            refined = convolve(
                windows, packed, row_pair, start // 2, SIZE, HEADS, SPAN, ROWS * KEYS // 4, PRECISION
            ).to(q.dtype.element_ty)
            refined = tl.reshape(refined, (ROWS // 2, KEYS // 2, 2, HEADS, 2))
            refined = tl.reshape(tl.permute(refined, (3, 1, 2, 0, 4)), (HEADS, KEYS, ROWS))
            refined = drop(
                refined,
                out_mask,
                out_mask_head,
                out_mask_row,
                out_mask_column,
                seed,
                image,
                heads[:, None, None],
                rows[None, None, :],
                columns[None, :, None],
                n_mixed,
                n_queries,
                n_keys,
                dropout_p,
                OUT_MASK,
                DROPOUT,
            ).to(q.dtype.element_ty)
            grads = load_heads(
                grad + image * grad_image, grad_head, grad_token, heads, rows, n_mixed, last_out, dim, DIM
            )
            result = tl.dot(refined, grads, result, input_precision=PRECISION)
        store_heads(dv + image * dv_image, dv_head, dv_token, result, heads, columns, n_mixed, n_keys, dim, DIM, ADD)
    else:
        # Not pipelined: asynchronous copies would land in an order that is read back two bytes at a time.
        for start_row in tl.range(first_out, last_out, ROWS, num_stages=1):
            rows = start_row + tl.arange(0, ROWS)
            pixels = (rows - first_out + SIZE // 2)[:, None] * width + columns[None, :] + SIZE // 2
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
