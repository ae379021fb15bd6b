"""Tokens of one head, read and written some at a time."""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, rows, stride, n_rows, dim, DIM: tl.constexpr):
    """[rows, DIM] of one head, zero outside."""
    channels = tl.arange(0, DIM)
    mask = (rows >= 0)[:, None] & (rows < n_rows)[:, None] & (channels < dim)[None, :]
    return tl.load(base + rows[:, None] * stride + channels[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, values, rows, stride, n_rows, dim, DIM: tl.constexpr):
    """Write [rows, DIM] of one head."""
    channels = tl.arange(0, DIM)
    mask = (rows < n_rows)[:, None] & (channels < dim)[None, :]
    tl.store(base + rows[:, None] * stride + channels[None, :], values.to(base.dtype.element_ty), mask=mask)
