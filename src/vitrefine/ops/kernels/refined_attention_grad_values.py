"""Backward: the gradient of the values."""

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
def grad_values_kernel(
    windows, packed, grad, out_mask, seed, dv, grad_image, grad_head, grad_token, dv_image, dv_head, dv_token,
    out_mask_image, out_mask_head, out_mask_row, out_mask_column, first_image, first_out, last_out, n_rows, n_mixed,
    n_queries, n_keys, dim, dropout_p, OUT_MASK: tl.constexpr, DROPOUT: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        refined = hide(
            refined, out_mask, out_mask_head, out_mask_row, out_mask_column, heads[:, None, None],
            rows[None, None, :], columns[None, :, None], n_mixed, n_queries, n_keys, OUT_MASK,
        )  # fmt: skip
        refined = drop(
            refined, seed, image, heads[:, None, None], rows[None, None, :], columns[None, :, None], n_queries, n_keys,
            dropout_p, DROPOUT,
        ).to(grad.dtype.element_ty)  # fmt: skip
        grads = load_heads(grad + image * grad_image, grad_head, grad_token, heads, rows, n_mixed, last_out, dim, DIM)
        result = tl.dot(refined, grads, result, input_precision=PRECISION)
    store_heads(dv + image * dv_image, dv_head, dv_token, result, heads, columns, n_mixed, n_keys, dim, DIM, ADD)


def bind_grad_values(
    launch: Launcher, call: Call, of: Buffer, maps: Tensor, packed: Tensor, grad: Tensor, dv: Tensor, *, add: bool
) -> Bound:
    """To be launched over (tiles of keys, images) of a chunk, with its first image, first row and last row."""
    tile, out_mask = call.tiles["grad_values"], call.out_mask
    seen = windows(maps, of, call.n_keys, call.size, tile)
    return launch.bind(
        grad_values_kernel,
        (
            *(seen, packed, grad, out_mask.values, call.seed, dv),
            *(*grad.stride()[:3], *dv.stride()[:3], *out_mask.strides),
        ),
        (of.rows, call.n_mixed, call.n_queries, call.n_keys, call.dim, call.dropout_p),
        DIM=call.padded_dim,
        ADD=add,
        **call.dropping,
        **call.products,
        **call.window,
        **tile.options(),
    )
