"""Masks of refined attention: what hides pairs from the softmax, and later from the refined maps."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UNMASKED, BOOLEAN, ADDITIVE = 0, 1, 2  # kinds of mask; an additive one says "hidden" with -inf


class Mask(NamedTuple):
    """A mask as a kernel takes it: a pointer (to anything, where there is no mask), strides, and its kind."""

    values: Tensor
    strides: tuple[int, ...]
    kind: int

    @classmethod
    def of(cls, mask: Tensor | None, stand_in: Tensor) -> "Mask":
        """Of a boolean or additive mask with four dimensions, any of them 1."""
        if mask is None:
            return cls(stand_in, (0, 0, 0, 0), UNMASKED)
        strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
        if mask.dtype == torch.bool:
            return cls(mask.view(torch.uint8), strides, BOOLEAN)
        return cls(mask, strides, ADDITIVE)


@triton.jit
def pairs_exist(heads, rows, columns, n_heads, n_rows, n_columns):
    """Whether broadcastable heads, rows and columns lie within maps."""
    return (heads < n_heads) & (rows >= 0) & (rows < n_rows) & (columns >= 0) & (columns < n_columns)


@triton.jit
def load_mask(
    mask, stride_head, stride_row, stride_column, heads, rows, columns, n_heads, n_rows, n_columns, KIND: tl.constexpr
):
    """One image's mask at broadcastable heads, rows and columns: what to add to the scores, in natural units."""
    exists = pairs_exist(heads, rows, columns, n_heads, n_rows, n_columns)
    place = mask + heads * stride_head + rows * stride_row + columns * stride_column
    if KIND == 1:
        added = tl.where(tl.load(place, mask=exists, other=0) != 0, 0.0, float("-inf"))
    else:
        added = tl.load(place, mask=exists, other=float("-inf")).to(tl.float32)
    return added


@triton.jit
def hide(
    value, mask, stride_head, stride_row, stride_column, heads, rows, columns, n_heads, n_rows, n_columns,
    KIND: tl.constexpr,
):  # fmt: skip
    """Zero for masked pairs of refined maps (or their gradient); indices broadcast to its shape."""
    if KIND:
        hidden = load_mask(
            mask, stride_head, stride_row, stride_column, heads, rows, columns, n_heads, n_rows, n_columns, KIND
        )
        value = tl.where(hidden > float("-inf"), value, 0.0)
    return value


@triton.jit
def drop(value, seed, image, heads, rows, columns, n_rows, n_columns, dropout_p, DROPOUT: tl.constexpr):
    """Dropout of refined maps (or their gradient); indices broadcast to its shape."""
    if DROPOUT:
        # One stream of random numbers an image, so that no offset outgrows 32 bits.
        draw = tl.rand(tl.load(seed) + image, (heads * n_rows + rows) * n_columns + columns)
        value = tl.where(draw >= dropout_p, value / (1.0 - dropout_p), 0.0)
    return value
