"""Tiles that the refined attention kernels read and write, all heads at once.

Inputs and results are (H, N, d) tensors of an image. Attention maps travel between the kernels through a buffer with
their heads innermost and a border of zeros: pixel (i, j) of an image is `HEADS` contiguous values.
"""

import triton
import triton.language as tl

from vitrefine.ops.kernels.refined_attention_mask import load_mask, pairs_exist


@triton.jit
def load_heads(tensor, stride_head, stride_token, heads, tokens, n_heads, n_tokens, dim, DIM: tl.constexpr):
    """[heads, tokens, DIM] of one image's (H, N, d) tensor, zero outside."""
    channels = tl.arange(0, DIM)[None, None, :]
    heads = heads[:, None, None]
    tokens = tokens[None, :, None]
    exists = (heads < n_heads) & (tokens >= 0) & (tokens < n_tokens) & (channels < dim)
    return tl.load(tensor + heads * stride_head + tokens * stride_token + channels, mask=exists, other=0.0)


@triton.jit
def store_heads(
    tensor, stride_head, stride_token, value, heads, tokens, n_heads, n_tokens, dim, DIM: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Write, or add to, [heads, tokens, DIM] of one image's (H, N, d) tensor."""
    channels = tl.arange(0, DIM)[None, None, :]
    heads = heads[:, None, None]
    tokens = tokens[None, :, None]
    exists = (heads < n_heads) & (tokens < n_tokens) & (channels < dim)
    place = tensor + heads * stride_head + tokens * stride_token + channels
    if ADD:
        value += tl.load(place, mask=exists, other=0.0)
    tl.store(place, value.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def load_tile(maps, stride_head, stride_row, heads, rows, columns, n_heads, n_rows, n_columns):
    """Values of one image's (G, Nq, Nk) maps at broadcastable heads, rows and columns; zero outside."""
    exists = pairs_exist(heads, rows, columns, n_heads, n_rows, n_columns)
    return tl.load(maps + heads * stride_head + rows * stride_row + columns, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def scores(
    q, k, mask, mask_head, mask_row, mask_column, heads, rows, columns, n_heads, n_rows, n_columns, scale,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [heads, rows, columns] in units of log 2, -inf where there is no key or the mask hides it."""
    s = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision=PRECISION) * (scale * 1.4426950408889634)
    if MASK:
        s += 1.4426950408889634 * load_mask(
            mask, mask_head, mask_row, mask_column, heads[:, None, None], rows[None, :, None], columns[None, None, :],
            n_heads, n_rows, n_columns, MASK,
        )  # fmt: skip
    else:
        s = tl.where(((columns >= 0) & (columns < n_columns))[None, None, :], s, float("-inf"))
    return s


@triton.jit
def store_maps(maps, value, heads, rows, columns, n_rows, width, HEADS: tl.constexpr):
    """Write a [heads, rows, columns] tile of maps, heads innermost, to rows and columns of a bordered buffer."""
    pixels = rows[:, None] * width + columns[None, :]
    exists = (rows < n_rows)[:, None] & (columns < width)[None, :]
    tl.store(
        maps + pixels[:, :, None] * HEADS + heads[None, None, :],
        tl.permute(value.to(maps.dtype.element_ty), (1, 2, 0)),
        mask=exists[:, :, None],
    )


@triton.jit
def load_score_grads(maps, grad_maps, delta, place, exists, image, heads, rows, n_heads, n_queries, last_out):
    """dS = P (dP - δ), [rows, columns, heads], of places in the buffer of maps."""
    p = tl.load(maps + place, mask=exists, other=0.0).to(tl.float32)
    dp = tl.load(grad_maps + place, mask=exists, other=0.0).to(tl.float32)
    row_sum = tl.load(
        delta + (image * n_heads + heads[None, :]) * n_queries + rows[:, None],
        mask=(heads < n_heads)[None, :] & (rows < last_out)[:, None],
        other=0.0,
    )
    return p * (dp - row_sum[:, None, :])
