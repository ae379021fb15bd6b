"""Backward: the gradient of the softmax maps, and of the queries."""

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Bound, Launcher
from vitrefine.ops.kernels.refined_attention_blocks import block_places, convolve, load_weights
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_plan import Buffer, windows
from vitrefine.ops.kernels.refined_attention_tiles import load_heads, store_heads


@triton.jit(
    do_not_specialize=["first_image", "first_out", "last_out", "n_rows", "width", "n_heads", "n_queries", "n_keys"]
)
def grad_scores_kernel(
    windows, maps, grad_maps, packed, k, seen_keys, delta, dq, k_image, k_head, k_token, dq_image, dq_head, dq_token,
    first_image, first_out, last_out, n_rows, width, n_heads, n_queries, n_keys, dim, scale, SIZE: tl.constexpr,
    HEADS: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dP = Mᵀ ⊛ dA*, δ(i) = Σ_j P dP, dQ = (Σ_j P dP K - δ · P K) · scale, for rows first_out … last_out."""
    slot = tl.program_id(1).to(tl.int64)
    image = first_image + slot
    maps += slot * n_rows * width * HEADS
    grad_maps += slot * n_rows * width * HEADS
    packed += 2 * (SIZE + 1) * SPAN * 4 * HEADS
    heads = tl.arange(0, HEADS)
    start_row = tl.program_id(0) * ROWS
    rows = first_out + start_row + tl.arange(0, ROWS)
    row_pair = (tl.program_id(1) * n_rows + start_row) // 2
    n_out = last_out - first_out
    products = tl.zeros((ROWS // 2, KEYS // 2, 2, HEADS), tl.float32)
    result = tl.zeros((HEADS, ROWS, DIM), tl.float32)
    weights = load_weights(packed, SIZE, HEADS, SPAN)
    for start in range(0, n_keys, KEYS):
        dp = convolve(windows, packed, weights, row_pair, start // 2, SIZE, HEADS, SPAN, ROWS * KEYS // 4, PRECISION)
        place, exists = block_places(start_row, start, n_out, n_keys, width, SIZE, HEADS, ROWS, KEYS)
        p = tl.load(maps + place, mask=exists, other=0.0)
        tl.store(grad_maps + place, dp.to(grad_maps.dtype.element_ty), mask=exists)
        product = tl.reshape(p.to(tl.float32) * dp, (ROWS // 2, KEYS // 2, 2, 2, HEADS))
        products += tl.sum(product, axis=3)
        product = tl.permute(product.to(k.dtype.element_ty), (4, 0, 2, 1, 3))
        product = tl.reshape(product, (HEADS, ROWS, KEYS))
        columns = start + tl.arange(0, KEYS)
        keys = load_heads(k + image * k_image, k_head, k_token, heads, columns, n_heads, n_keys, dim, DIM)
        result = tl.dot(product, keys, result, input_precision=PRECISION)
    row_sum = tl.permute(tl.reshape(tl.sum(products, axis=1), (ROWS, HEADS)), (1, 0))
    tl.store(
        delta + (image * n_heads + heads[:, None]) * n_queries + rows[None, :],
        row_sum,
        mask=(heads < n_heads)[:, None] & (rows < last_out)[None, :],
    )
    seen_keys += slot * n_heads * n_rows * dim
    buffer_rows = start_row + SIZE // 2 + tl.arange(0, ROWS)
    seen = load_heads(seen_keys, n_rows * dim, dim, heads, buffer_rows, n_heads, n_rows, dim, DIM)
    result = (result - row_sum[:, :, None] * seen) * scale
    store_heads(dq + image * dq_image, dq_head, dq_token, result, heads, rows, n_heads, last_out, dim, DIM, False)


def bind_grad_scores(
    launch: Launcher,
    call: Call,
    of: Buffer,
    grad_refined: Tensor,
    maps: Tensor,
    grad_maps: Tensor,
    packed: Tensor,
    seen_keys: Tensor,
    delta: Tensor,
    dq: Tensor,
) -> Bound:
    """To be launched over (tiles of rows, images) of a chunk, with its first image, first row and last row."""
    tile, k = call.tiles["grad_scores"], call.k
    seen = windows(grad_refined, of, call.n_keys, call.size, tile)
    return launch.bind(
        grad_scores_kernel,
        (seen, maps, grad_maps, packed, k, seen_keys, delta, dq, *k.stride()[:3], *dq.stride()[:3]),
        (of.rows, of.width, call.heads, call.n_queries, call.n_keys, call.dim, call.scale),
        DIM=call.padded_dim,
        **call.products,
        **call.window,
        **tile.options(),
    )
