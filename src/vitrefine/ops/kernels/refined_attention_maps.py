"""Softmax maps of a chunk, heads innermost; in the backward pass also the gradient of the refined maps."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Bound, Launcher
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_mask import drop, hide
from vitrefine.ops.kernels.refined_attention_plan import Buffer
from vitrefine.ops.kernels.refined_attention_tiles import load_heads, load_tile, scores, store_heads, store_maps


@triton.jit(
    do_not_specialize=["first_image", "first_row", "n_rows", "width", "n_heads", "n_mixed", "n_queries", "n_keys"]
)
def maps_kernel(
    q, k, v, grad, grad_kept, mask, out_mask, seed, lse, maps, grad_refined, seen_keys, q_image, q_head, q_token,
    k_image, k_head, k_token, v_image, v_head, v_token, grad_image, grad_head, grad_token, grad_kept_image,
    grad_kept_head, grad_kept_row, mask_image, mask_head, mask_row, mask_column, out_mask_image, out_mask_head,
    out_mask_row, out_mask_column, first_image, first_row, n_rows, width, n_heads, n_mixed, n_queries, n_keys, dim,
    scale, dropout_p, MASK: tl.constexpr, OUT_MASK: tl.constexpr, DROPOUT: tl.constexpr, KEPT: tl.constexpr,
    PAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P from its log-sum-exp (program_id(2) = 0), or dA*_g(i, j) = dO_g(i) · V_g(j) (1), for a chunk.

    With KEPT, A* left the operator as a result of its own, and its gradient is added.

    The buffer's n_rows rows start with image row first_row, its `width` columns with key -PAD: both with a border,
    where maps are zero.

    Backward, P K is kept beside P: dQ = Σ_j P (dP - δ) K = Σ_j P dP K - δ · P K needs no second sweep for δ then.
    """
    slot = tl.program_id(1).to(tl.int64)
    image = first_image + slot
    heads = tl.arange(0, HEADS)
    buffer_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = first_row + buffer_rows
    in_image = (rows >= 0) & (rows < n_queries)
    if tl.program_id(2) == 0:
        maps += slot * n_rows * width * HEADS
        queries = load_heads(q + image * q_image, q_head, q_token, heads, rows, n_heads, n_queries, dim, DIM)
        norm = tl.load(
            lse + image * n_heads * n_queries + heads[:, None] * n_queries + rows[None, :],
            mask=(heads < n_heads)[:, None] & in_image[None, :],
            other=float("inf"),
        )
        seen = tl.zeros((HEADS, ROWS, DIM), tl.float32)
        for start in range(0, width, KEYS):
            columns = start - PAD + tl.arange(0, KEYS)
            keys = load_heads(k + image * k_image, k_head, k_token, heads, columns, n_heads, n_keys, dim, DIM)
            s = scores(
                queries, keys, mask + image * mask_image, mask_head, mask_row, mask_column, heads, rows, columns,
                n_heads, n_queries, n_keys, scale, MASK, PRECISION,
            )  # fmt: skip
            p = tl.exp2(s - norm[:, :, None]).to(maps.dtype.element_ty)
            store_maps(maps, p, heads, buffer_rows, columns + PAD, n_rows, width, HEADS)
            if BACKWARD:
                seen = tl.dot(p, keys, seen, input_precision=PRECISION)
        if BACKWARD:
            seen_keys += slot * n_heads * n_rows * dim
            store_heads(seen_keys, n_rows * dim, dim, seen, heads, buffer_rows, n_heads, n_rows, dim, DIM, False)
    if BACKWARD and tl.program_id(2) == 1:
        grad_refined += slot * n_rows * width * HEADS
        grads = load_heads(grad + image * grad_image, grad_head, grad_token, heads, rows, n_mixed, n_queries, dim, DIM)
        for start in range(0, width, KEYS):
            columns = start - PAD + tl.arange(0, KEYS)
            values = load_heads(v + image * v_image, v_head, v_token, heads, columns, n_mixed, n_keys, dim, DIM)
            product = tl.dot(grads, tl.permute(values, (0, 2, 1)), input_precision=PRECISION)
            product = drop(
                product, seed, image, heads[:, None, None], rows[None, :, None], columns[None, None, :], n_queries,
                n_keys, dropout_p, DROPOUT,
            )  # fmt: skip
            if KEPT:
                product += load_tile(
                    grad_kept + image * grad_kept_image, grad_kept_head, grad_kept_row, heads[:, None, None],
                    rows[None, :, None], columns[None, None, :], n_mixed, n_queries, n_keys,
                )  # fmt: skip
            product = hide(
                product, out_mask + image * out_mask_image, out_mask_head, out_mask_row, out_mask_column,
                heads[:, None, None], rows[None, :, None], columns[None, None, :], n_mixed, n_queries, n_keys, OUT_MASK,
            )  # fmt: skip
            store_maps(grad_refined, product, heads, buffer_rows, columns + PAD, n_rows, width, HEADS)


class RefinedGrads(NamedTuple):
    """What the kernel reads and writes in the backward pass only."""

    grad: Tensor  # dO
    grad_kept: Tensor | None  # what comes back for refined maps that were kept
    grad_refined: Tensor  # where dA* goes
    seen_keys: Tensor  # where P K goes


def bind_maps(
    launch: Launcher, call: Call, of: Buffer, lse: Tensor, maps: Tensor, grads: RefinedGrads | None = None
) -> Bound:
    """To be launched over (tiles of rows, images, 2 backward) of a chunk, with its first image and buffered row."""
    q, k, v, mask, out_mask = call.q, call.k, call.v, call.mask, call.out_mask
    backward = grads is not None
    grad, kept, refined, seen_keys = grads or (q, None, maps, lse)  # pointers to anything, where none is read
    given, kept_strides = (q, (0, 0, 0)) if kept is None else (kept, kept.stride()[:3])
    return launch.bind(
        maps_kernel,
        (
            *(q, k, v, grad, given, mask.values, out_mask.values, call.seed, lse, maps, refined, seen_keys),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3]),
            *(*kept_strides, *mask.strides, *out_mask.strides),
        ),
        (
            *(of.rows, of.width, call.heads, call.n_mixed, call.n_queries, call.n_keys, call.dim),
            *(call.scale, call.dropout_p),
        ),
        MASK=mask.kind,
        KEPT=kept is not None,
        DIM=call.padded_dim,
        PAD=call.pad,
        BACKWARD=backward,
        **call.dropping,
        **call.products,
        **call.tiles["maps_backward" if backward else "maps"].options(),
    )
