"""Backward: the gradients of queries, keys and values of relative attention, over queries first, then over keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.relative_attention_call import Call
from vitrefine.ops.kernels.relative_attention_tiles import (
    biased_scores,
    head_strips,
    key_place,
    query_place,
    score_grads,
)
from vitrefine.ops.kernels.rows import load_rows, store_rows
from vitrefine.ops.kernels.shapes import cdiv


@triton.jit
def grad_queries_kernel(
    q, k, v, strips, out, grad, lse, delta, grad_q, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head,
    v_token, out_image, out_head, out_token, grad_image, grad_head, grad_token, n_heads, n_tokens, width, dim, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of ROWS queries, and δ(i) = dO(i)·O(i), which the other kernels read."""
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    height = n_tokens // width
    query_bias = head_strips(strips, head, width, height, RUN) + query_place(rows, width, height, RUN)
    queries = load_rows(q + image * q_image + head * q_head, rows, q_token, n_tokens, dim, DIM)
    grads = load_rows(grad + image * grad_image + head * grad_head, rows, grad_token, n_tokens, dim, DIM)
    outs = load_rows(out + image * out_image + head * out_head, rows, out_token, n_tokens, dim, DIM)
    row_delta = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    at = tl.program_id(1).to(tl.int64) * n_tokens + rows
    tl.store(delta + at, row_delta, mask=rows < n_tokens)
    norm = tl.load(lse + at, mask=rows < n_tokens, other=float("inf"))
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    total = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, n_tokens, KEYS):
        columns = start + tl.arange(0, KEYS)
        keys = load_rows(k, columns, k_token, n_tokens, dim, DIM)
        values = load_rows(v, columns, v_token, n_tokens, dim, DIM)
        bias = tl.load(query_bias[:, None] + key_place(columns, width, height, RUN)[None, :])
        steep = score_grads(queries, keys, bias, norm, grads, values, row_delta, scale, PRECISION)
        total = tl.dot(steep.to(keys.dtype), keys, total, input_precision=PRECISION)  # keys past the last are zero
    total *= scale * 0.6931471805599453
    store_rows(grad_q + tl.program_id(1).to(tl.int64) * n_tokens * dim, total, rows, dim, n_tokens, dim, DIM)


@triton.jit
def grad_keys_kernel(
    q, k, v, strips, grad, lse, delta, grad_k, grad_v, q_image, q_head, q_token, k_image, k_head, k_token, v_image,
    v_head, v_token, grad_image, grad_head, grad_token, n_heads, n_tokens, width, dim, scale, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of KEYS keys and values; maps are held transposed, keys first."""
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    height = n_tokens // width
    key_bias = head_strips(strips, head, width, height, RUN) + key_place(columns, width, height, RUN)
    keys = load_rows(k + image * k_image + head * k_head, columns, k_token, n_tokens, dim, DIM)
    values = load_rows(v + image * v_image + head * v_head, columns, v_token, n_tokens, dim, DIM)
    q += image * q_image + head * q_head
    grad += image * grad_image + head * grad_head
    lse += tl.program_id(1).to(tl.int64) * n_tokens
    delta += tl.program_id(1).to(tl.int64) * n_tokens
    total_k = tl.zeros((KEYS, DIM), tl.float32)
    total_v = tl.zeros((KEYS, DIM), tl.float32)
    for start in range(0, n_tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        queries = load_rows(q, rows, q_token, n_tokens, dim, DIM)
        grads = load_rows(grad, rows, grad_token, n_tokens, dim, DIM)
        norm = tl.load(lse + rows, mask=rows < n_tokens, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=rows < n_tokens, other=0.0)
        bias = tl.load(key_bias[:, None] + query_place(rows, width, height, RUN)[None, :])
        maps = tl.exp2(biased_scores(keys, queries, bias, scale, PRECISION) - norm[None, :])
        total_v = tl.dot(maps.to(grads.dtype), grads, total_v, input_precision=PRECISION)
        steep = maps * (tl.dot(values, tl.trans(grads), input_precision=PRECISION) - row_delta[None, :])
        total_k = tl.dot(steep.to(queries.dtype), queries, total_k, input_precision=PRECISION)
    total_k *= scale * 0.6931471805599453
    at = tl.program_id(1).to(tl.int64) * n_tokens * dim
    store_rows(grad_k + at, total_k, columns, dim, n_tokens, dim, DIM)
    store_rows(grad_v + at, total_v, columns, dim, n_tokens, dim, DIM)


def grad_inputs(
    launch: Launcher, call: Call, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and δ."""
    delta = torch.empty_like(lse)
    grad_q, grad_k, grad_v = (call.q.new_empty(call.q.shape) for _ in range(3))
    tile = call.tile("grad_queries")
    launch(
        grad_queries_kernel,
        (cdiv(call.n_tokens, tile["ROWS"]), call.batch * call.heads, 1),
        *(*call.inputs, out, grad, lse, delta, grad_q),
        *(*call.strides, *out.stride()[:3], *grad.stride()[:3]),
        *call.sizes,
        **call.constants,
        **tile,
    )
    tile = call.tile("grad_keys")
    launch(
        grad_keys_kernel,
        (cdiv(call.n_tokens, tile["KEYS"]), call.batch * call.heads, 1),
        *(*call.inputs, grad, lse, delta, grad_k, grad_v),
        *(*call.strides, *grad.stride()[:3]),
        *call.sizes,
        **call.constants,
        **tile,
    )
    return grad_q, grad_k, grad_v, delta
