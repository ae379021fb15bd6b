"""The forward pass of relative attention: what is kept of a row of scores is its log-sum-exp."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.relative_attention_call import Call
from vitrefine.ops.kernels.relative_attention_tiles import biased_scores, head_strips, key_place, query_place
from vitrefine.ops.kernels.rows import load_rows, store_rows
from vitrefine.ops.kernels.shapes import cdiv


@triton.jit
def attend_kernel(
    q, k, v, strips, out, lse, q_image, q_head, q_token, k_image, k_head, k_token, v_image, v_head, v_token, out_image,
    out_head, out_token, n_heads, n_tokens, width, dim, scale, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log2-sum-exp of ROWS queries of one head."""
    image = (tl.program_id(1) // n_heads).to(tl.int64)
    head = tl.program_id(1) % n_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    height = n_tokens // width
    query_bias = head_strips(strips, head, width, height, RUN) + query_place(rows, width, height, RUN)
    queries = load_rows(q + image * q_image + head * q_head, rows, q_token, n_tokens, dim, DIM)
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    read = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, n_tokens, KEYS):
        columns = start + tl.arange(0, KEYS)
        keys = load_rows(k, columns, k_token, n_tokens, dim, DIM)
        bias = tl.load(query_bias[:, None] + key_place(columns, width, height, RUN)[None, :])
        scores = biased_scores(queries, keys, bias, scale, PRECISION)
        scores = tl.where((columns < n_tokens)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        maps = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(maps, 1)
        values = load_rows(v, columns, v_token, n_tokens, dim, DIM)
        read = tl.dot(maps.to(values.dtype), values, read * shrink[:, None], input_precision=PRECISION)
        top = higher
    store_rows(
        out + image * out_image + head * out_head, read / total[:, None], rows, out_token, n_tokens, dim, DIM
    )  # fmt: skip
    tl.store(lse + tl.program_id(1).to(tl.int64) * n_tokens + rows, top + tl.log2(total), mask=rows < n_tokens)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, d), laid out as (B, N, H, d), and log2-sum-exp (B, H, N)."""
    batch, heads, n_tokens, dim = q.shape
    out = q.new_empty((batch, n_tokens, heads, dim)).transpose(1, 2)
    return out, q.new_empty((batch, heads, n_tokens), dtype=torch.float32)


def attend(launch: Launcher, call: Call) -> tuple[Tensor, Tensor]:
    """`empty_results`, filled."""
    out, lse = empty_results(call.q)
    tile = call.tile("attend")
    launch(
        attend_kernel,
        (cdiv(call.n_tokens, tile["ROWS"]), call.batch * call.heads, 1),
        *(*call.inputs, out, lse),
        *(*call.strides, *out.stride()[:3]),
        *call.sizes,
        **call.constants,
        **tile,
    )
    return out, lse
