"""Refined maps times values: the second half of the forward pass."""

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Bound, Launcher
from vitrefine.ops.kernels.refined_attention_blocks import convolve, load_weights
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_mask import drop, hide
from vitrefine.ops.kernels.refined_attention_plan import Buffer, windows
from vitrefine.ops.kernels.refined_attention_tiles import load_heads, store_heads


@triton.jit(do_not_specialize=["first_image", "first_out", "last_out", "n_rows", "n_mixed", "n_queries", "n_keys"])
def aggregate_kernel(
    windows, packed, v, out_mask, seed, out, kept, v_image, v_head, v_token, out_image, out_head, out_token, kept_image,
    kept_head, kept_row, out_mask_image, out_mask_head, out_mask_row, out_mask_column, first_image, first_out, last_out,
    n_rows, n_mixed, n_queries, n_keys, dim, dropout_p, OUT_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    KEEP: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        refined = hide(
            refined, out_mask, out_mask_head, out_mask_row, out_mask_column, heads[:, None, None],
            rows[None, :, None], columns[None, None, :], n_mixed, n_queries, n_keys, OUT_MASK,
        ).to(v.dtype.element_ty)  # fmt: skip
        if KEEP:
            place = heads[:, None, None] * kept_head + rows[None, :, None] * kept_row + columns[None, None, :]
            within = (heads < n_mixed)[:, None, None] & (rows < last_out)[None, :, None]
            tl.store(kept + place, refined, mask=within & (columns < kept_row)[None, None, :])
        refined = drop(
            refined, seed, image, heads[:, None, None], rows[None, :, None], columns[None, None, :], n_queries, n_keys,
            dropout_p, DROPOUT,
        ).to(v.dtype.element_ty)  # fmt: skip
        values = load_heads(v, v_head, v_token, heads, columns, n_mixed, n_keys, dim, DIM)
        result = tl.dot(refined, values, result, input_precision=PRECISION)
    store_heads(out + image * out_image, out_head, out_token, result, heads, rows, n_mixed, last_out, dim, DIM, False)


def bind_aggregate(
    launch: Launcher, call: Call, of: Buffer, maps: Tensor, packed: Tensor, out: Tensor, kept: Tensor, *, keep: bool
) -> Bound:
    """To be launched over (tiles of rows, images) of a chunk, with its first image, first row and last row."""
    tile, v, out_mask = call.tiles["aggregate"], call.v, call.out_mask
    kept_strides = kept.stride()[:3] if keep else (0, 0, 0)
    seen = windows(maps, of, call.n_keys, call.size, tile)
    return launch.bind(
        aggregate_kernel,
        (
            *(seen, packed, v, out_mask.values, call.seed, out, kept),
            *(*v.stride()[:3], *out.stride()[:3], *kept_strides, *out_mask.strides),
        ),
        (of.rows, call.n_mixed, call.n_queries, call.n_keys, call.dim, call.dropout_p),
        KEEP=keep,
        DIM=call.padded_dim,
        **call.dropping,
        **call.products,
        **call.window,
        **tile.options(),
    )
