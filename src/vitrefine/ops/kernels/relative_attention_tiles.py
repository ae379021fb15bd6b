"""Pieces that the relative attention kernels share.

What a kernel reads of the bias are strips: for each displacement of rows, the (w, w) biases of pairs of columns, 2/h of
the full bias and contiguous along keys, so that several are read at a time. Query and key each know a place in the
strips of a head; their sum is the place of the pair's bias. Scores are in units of log 2 throughout.
"""

import triton
import triton.language as tl


@triton.jit
def cut(tokens, width, height):
    """Row and column of tokens; one past the last is given the last row, so that no address leaves the strips."""
    # Integers are divided slowly. Half a token away from the nearest whole quotient, a float is exact to 2^21 tokens.
    row = ((tokens.to(tl.float32) + 0.5) * (1.0 / width)).to(tl.int32)
    return tl.minimum(row, height - 1), tokens - row * width


@triton.jit
def head_strips(strips, head, width, height, RUN: tl.constexpr):
    """The strips of one head."""
    return strips + tl.multiple_of(head * (2 * height - 1) * width * width, RUN)


@triton.jit
def query_place(tokens, width, height, RUN: tl.constexpr):
    row, column = cut(tokens, width, height)
    return tl.multiple_of(((row + height - 1) * width + width - 1 - column) * width, RUN)


@triton.jit
def key_place(tokens, width, height, RUN: tl.constexpr):
    row, column = cut(tokens, width, height)
    return tl.max_contiguous(tl.multiple_of(column - row * width * width, RUN), RUN)


@triton.jit
def biased_scores(left, right, bias, scale, PRECISION: tl.constexpr):
    """Scores of queries (left) and keys (right), or transposed of keys and queries."""
    return tl.dot(left, tl.trans(right), input_precision=PRECISION) * scale + bias.to(tl.float32)


@triton.jit
def score_grads(queries, keys, bias, norm, grads, values, row_delta, scale, PRECISION: tl.constexpr):
    """P(i, j) · (dO(i)·V(j) - δ(i)) of a tile, P out of the scores and their log2-sum-exp."""
    maps = tl.exp2(biased_scores(queries, keys, bias, scale, PRECISION) - norm[:, None])
    return maps * (tl.dot(grads, tl.trans(values), input_precision=PRECISION) - row_delta[:, None])
