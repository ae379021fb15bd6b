"""Refined maps times values: the second half of the forward pass."""

import triton
import triton.language as tl

from vitrefine.ops.kernels.refined_attention_blocks import convolve, drop, load_heads, load_weights, store_heads


@triton.jit(do_not_specialize=["first_image", "first_out", "last_out", "n_rows", "n_mixed", "n_queries", "n_keys"])
def aggregate_kernel(
    windows,
    packed,
    v,
    out_mask,
    seed,
    out,
    kept,
    v_image,
    v_head,
    v_token,
    out_image,
    out_head,
    out_token,
    kept_image,
    kept_head,
    kept_row,
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
    KEEP: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """O_g(i) = Σ_j A*_g(i, j) V_g(j), A* = M ⊛ P, for output rows first_out … last_out.

    With KEEP, A* is written too, to rows of `kept_row` values: that many are a whole number of tiles, and what lies
    past the last key is not read.
    """
    slot = tl.program_id(1).to(tl.int64)
    image = first_image + slot
    v += image * v_image
    kept += image * kept_image
    out_mask += image * out_mask_image
    heads = tl.arange(0, HEADS)
    start_row = first_out + tl.program_id(0) * ROWS
    rows = start_row + tl.arange(0, ROWS)
    row_pair = (tl.program_id(1) * n_rows + tl.program_id(0) * ROWS) // 2
    result = tl.zeros((HEADS, ROWS, DIM), tl.float32)
    weights = load_weights(packed, SIZE, HEADS, SPAN)
    for start in range(0, n_keys, KEYS):
        columns = start + tl.arange(0, KEYS)
        refined = convolve(
            windows, packed, weights, row_pair, start // 2, SIZE, HEADS, SPAN, ROWS * KEYS // 4, PRECISION
        ).to(v.dtype.element_ty)
        refined = tl.reshape(refined, (ROWS // 2, KEYS // 2, 2, HEADS, 2))
        refined = tl.reshape(tl.permute(refined, (3, 0, 2, 1, 4)), (HEADS, ROWS, KEYS))
        refined = drop(
            refined,
            out_mask,
            out_mask_head,
            out_mask_row,
            out_mask_column,
            seed,
            image,
            heads[:, None, None],
            rows[None, :, None],
            columns[None, None, :],
            n_mixed,
            n_queries,
            n_keys,
            dropout_p,
            OUT_MASK,
            False,
        ).to(v.dtype.element_ty)
        if KEEP:
            place = heads[:, None, None] * kept_head + rows[None, :, None] * kept_row + columns[None, None, :]
            within = (heads < n_mixed)[:, None, None] & (rows < last_out)[None, :, None]
            tl.store(kept + place, refined, mask=within & (columns < kept_row)[None, None, :])
        refined = drop(
            refined,
            out_mask,
            out_mask_head,
            out_mask_row,
            out_mask_column,
            seed,
            image,
            heads[:, None, None],
            rows[None, :, None],
            columns[None, None, :],
            n_mixed,
            n_queries,
            n_keys,
            dropout_p,
            0,
            DROPOUT,
        ).to(v.dtype.element_ty)
        values = load_heads(v, v_head, v_token, heads, columns, n_mixed, n_keys, dim, DIM)
        result = tl.dot(refined, values, result, input_precision=PRECISION)
    store_heads(out + image * out_image, out_head, out_token, result, heads, rows, n_mixed, last_out, dim, DIM, False)
