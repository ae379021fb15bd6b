"""Deformable merging: a convolution that reads its taps where learned offsets point (LIT, Eqn. 7).

LIT merges with kernel = stride = 2; models that merge otherwise (3×3 with stride 2, depth-wise) are served too. Each
output token reads its points of the map, the regular grid moved by the offsets, bilinearly and with zeros outside, and
multiplies them by one weight matrix. `impl="reference"` is plain PyTorch, any dtype, no compiled extension, and the
specification; `impl="triton"` does the same on a GPU. The sampling rule and the order of the offset channels (dy, dx of
tap 0, of tap 1, …; taps row-major) are torchvision's `deform_conv2d`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import check_choice
from vitrefine.ops.choice import AMPERE, HALF, computes_in, demand_gpu, runs_kernels

IMPLEMENTATIONS = ("auto", "reference", "triton")
KERNEL_TYPES = {*HALF, torch.float32}
Size = int | tuple[int, int]


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def sample_points(
    offset: Tensor, kernel_size: Size, *, stride: Size | None = None, padding: Size = 0, dilation: Size = 1
) -> tuple[Tensor, Tensor]:
    """Row and column coordinates of every tap, (B, taps, h, w) each, in pixels of the input map.

    Args:
        offset: Displacements in pixels, (B, 2·taps, h, w), h × w being the output map.
        kernel_size: Taps down and across.
        stride: Pixels from one window to the next; the kernel's size if None.
        padding: Pixels by which the first window lies outside.
        dilation: Pixels from one tap to the next.
    """
    (down, across), (pad_row, pad_column), (apart_row, apart_column) = map(_pair, (kernel_size, padding, dilation))
    step_row, step_column = (down, across) if stride is None else _pair(stride)
    _, _, height, width = offset.shape
    # Below float32 a coordinate beyond 256 would lose its fraction.
    offset = offset.to(torch.promote_types(offset.dtype, torch.float32))
    dy, dx = offset.unflatten(1, (down * across, 2)).unbind(2)

    def count(length: int) -> Tensor:
        return torch.arange(length, device=offset.device, dtype=offset.dtype)

    tap_row = (count(down) * apart_row).repeat_interleave(across)[:, None, None]
    tap_column = (count(across) * apart_column).repeat(down)[:, None, None]
    row = count(height)[:, None] * step_row - pad_row
    column = count(width) * step_column - pad_column
    return row + tap_row + dy, column + tap_column + dx


def sample_bilinear(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Read an NHWC map at fractional points (B, P): bilinear, zero outside. Returns (B, P, C)."""
    batch, height, width, channels = x.shape
    tokens = x.reshape(batch, height * width, channels)
    top, left = rows.floor(), columns.floor()
    below, right = rows - top, columns - left
    lost = rows.isnan() | columns.isnan()  # no place is outside: what went wrong upstream has to be seen
    sampled = None
    first_row, first_column = top.long(), left.long()
    for row, row_weight in ((first_row, 1 - below), (first_row + 1, below)):
        for column, column_weight in ((first_column, 1 - right), (first_column + 1, right)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            index = torch.where(inside, row * width + column, 0)
            corner = tokens.gather(1, index[..., None].expand(-1, -1, channels))
            weight = torch.where(inside | lost, row_weight * column_weight, 0).to(x.dtype)[..., None]
            sampled = corner * weight if sampled is None else sampled + corner * weight
    assert sampled is not None
    return sampled


def deform_map(
    x: Tensor, offset: Tensor, kernel_size: Size, *, stride: Size | None = None, padding: Size = 0, dilation: Size = 1
) -> Tensor:
    """The map in which every tap of every window lies where the regular grid of kernel = stride would look for it.

    Where kernel and stride are equal already the result has the size of `x`: windows do not overlap, and each point of
    the map is one tap.

    Args:
        x: Map, (B, H, W, C).
        offset: Displacements in pixels, (B, 2·taps, h, w), h × w being the output map.
        kernel_size, stride, padding, dilation: As in `sample_points`.

    Returns:
        (B, h·kernel, w·kernel, C).
    """
    down, across = _pair(kernel_size)
    height, width = offset.shape[2:]
    points = sample_points(offset, kernel_size, stride=stride, padding=padding, dilation=dilation)
    rows, columns = (p.unflatten(1, (down, across)).permute(0, 3, 1, 4, 2).flatten(1) for p in points)
    return sample_bilinear(x, rows, columns).unflatten(1, (height * down, width * across))


def _kernels_apply(x: Tensor, offset: Tensor, weight: Tensor) -> bool:
    kinds = {computes_in(x), computes_in(weight)}
    one_kind = len(kinds) == 1 and kinds <= KERNEL_TYPES and offset.dtype in KERNEL_TYPES
    return one_kind and runs_kernels(x, AMPERE)


def deformable_merge(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    impl: str = "auto",
) -> Tensor:
    """Merge each window of an NHWC map into one token.

    Args:
        x: Map, (B, H, W, C).
        offset: Displacements in pixels, (B, 2·taps, h, w), h × w being the output map: H // k × W // k if kernel and
            stride are k and nothing is padded.
        weight: (C_out, C // groups, kernel, kernel).
        bias: (C_out,).
        stride, padding, dilation: As in `sample_points`.
        groups: Groups of channels that do not mix.
        impl: `reference`, `triton` (on a GPU, without groups), or `auto`: the kernels where they apply.

    Returns:
        (B, h, w, C_out).
    """
    check_choice("implementation", impl, IMPLEMENTATIONS)
    if impl == "auto":
        impl = "triton" if groups == 1 and _kernels_apply(x, offset, weight) else "reference"
    if impl == "triton":
        demand_gpu(x, "reference")
        from vitrefine.ops.kernels.deformable_merge_op import deformable_merge_triton

        return deformable_merge_triton(x, offset, weight, bias, stride=stride, padding=padding, dilation=dilation)
    kernel_size = (weight.shape[2], weight.shape[3])
    geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if groups > 1:
        taps = deform_map(x, offset, kernel_size, **geometry).permute(0, 3, 1, 2)
        return F.conv2d(taps, weight, bias, stride=kernel_size, groups=groups).permute(0, 2, 3, 1)
    points = sample_points(offset, kernel_size, **geometry)
    rows, columns = (p.permute(0, 2, 3, 1).flatten(1) for p in points)
    windows = sample_bilinear(x, rows, columns)
    windows = windows.reshape(x.shape[0], *offset.shape[2:], kernel_size[0] * kernel_size[1] * x.shape[-1])
    return F.linear(windows, weight.permute(0, 2, 3, 1).flatten(1), bias)
