"""Backward: the gradient of the values."""

import triton
import triton.language as tl

from vitrefine.ops.kernels.refined_attention_blocks import convolve, drop, load_heads, load_weights, store_heads


@triton.jit(do_not_specialize=["first_image", "first_out", "last_out", "n_rows", "n_mixed", "n_queries", "n_keys"])
def grad_values_kernel(
    windows,
    packed,
    grad,
    out_mask,
    seed,
    dv,
    grad_image,
    grad_head,
    grad_token,
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
    n_mixed,
    n_queries,
    n_keys,
    dim,
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
    """dV = A*ᵀ dO, from rows first_out … last_out."""
    slot = tl.program_id(1).to(tl.int64)
    image = first_image + slot
    packed += (SIZE + 1) * SPAN * 4 * HEADS
    out_mask += image * out_mask_image
    heads = tl.arange(0, HEADS)
    start = tl.program_id(0) * KEYS
    columns = start + tl.arange(0, KEYS)
    result = tl.zeros((HEADS, KEYS, DIM), tl.float32)
    weights = load_weights(packed, SIZE, HEADS, SPAN)
    for start_row in range(first_out, last_out, ROWS):
        rows = start_row + tl.arange(0, ROWS)
        row_pair = (tl.program_id(1) * n_rows + start_row - first_out) // 2
        refined = convolve(
            windows, packed, weights, row_pair, start // 2, SIZE, HEADS, SPAN, ROWS * KEYS // 4, PRECISION
        ).to(grad.dtype.element_ty)
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
        ).to(grad.dtype.element_ty)
        grads = load_heads(grad + image * grad_image, grad_head, grad_token, heads, rows, n_mixed, last_out, dim, DIM)
        result = tl.dot(refined, grads, result, input_precision=PRECISION)
    store_heads(dv + image * dv_image, dv_head, dv_token, result, heads, columns, n_mixed, n_keys, dim, DIM, ADD)
