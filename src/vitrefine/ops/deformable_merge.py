"""Deformable merging: a deformable convolution whose kernel equals its stride (LIT, Eqn. 7).

Each output token reads k×k points of the map, the regular grid moved by learned offsets, bilinearly and with zeros
outside, and multiplies them by one weight matrix. The windows do not overlap, so the sampled map has the size of the
input and the product is one matrix product: plain PyTorch, any dtype, no compiled extension. The sampling rule and
the order of the offset channels (dy, dx of tap 0, of tap 1, …; taps row-major) are torchvision's `deform_conv2d`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sample_points(offset: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Row and column coordinates of every tap, (B, k², h, w) each, in pixels of the input map."""
    _, _, height, width = offset.shape
    # Below float32 a coordinate beyond 256 would lose its fraction.
    offset = offset.float() if offset.dtype in (torch.float16, torch.bfloat16) else offset
    dy, dx = offset.unflatten(1, (kernel_size * kernel_size, 2)).unbind(2)
    tap = torch.arange(kernel_size, device=offset.device, dtype=offset.dtype)
    tap_row = tap.repeat_interleave(kernel_size)[:, None, None]
    tap_column = tap.repeat(kernel_size)[:, None, None]
    row = torch.arange(height, device=offset.device, dtype=offset.dtype)[:, None] * kernel_size
    column = torch.arange(width, device=offset.device, dtype=offset.dtype) * kernel_size
    return row + tap_row + dy, column + tap_column + dx


def sample_bilinear(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Read an NHWC map at fractional points (B, P): bilinear, zero outside. Returns (B, P, C)."""
    batch, height, width, channels = x.shape
    tokens = x.reshape(batch, height * width, channels)
    top, left = rows.floor(), columns.floor()
    below, right = rows - top, columns - left
    sampled = None
    first_row, first_column = top.long(), left.long()
    for row, row_weight in ((first_row, 1 - below), (first_row + 1, below)):
        for column, column_weight in ((first_column, 1 - right), (first_column + 1, right)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            index = torch.where(inside, row * width + column, 0)
            corner = tokens.gather(1, index[..., None].expand(-1, -1, channels))
            weight = torch.where(inside, row_weight * column_weight, 0).to(x.dtype)[..., None]
            sampled = corner * weight if sampled is None else sampled + corner * weight
    assert sampled is not None
    return sampled


def deformable_merge(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Merge each k×k window of an NHWC map into one token.

    Args:
        x: Map, (B, H, W, C).
        offset: Displacements in pixels, (B, 2k², H // k, W // k).
        weight: (C_out, C, k, k).
        bias: (C_out,).

    Returns:
        (B, H // k, W // k, C_out).
    """
    kernel_size = weight.shape[-1]
    taps = kernel_size * kernel_size
    rows, columns = (points.permute(0, 2, 3, 1).flatten(1) for points in sample_points(offset, kernel_size))
    windows = sample_bilinear(x, rows, columns)
    windows = windows.reshape(x.shape[0], *offset.shape[2:], taps * x.shape[-1])
    return F.linear(windows, weight.permute(0, 2, 3, 1).flatten(1), bias)
