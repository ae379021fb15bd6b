"""Samples of a map between its pixels; backward also what follows from them for the offsets.

A tap reads the four pixels around its point, weighted bilinearly; d offset is dS times the differences between them.
"""

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.shapes import cdiv

Geometry = list[int]  # stride, padding, dilation; down and across of each
GEOMETRY = ("DOWN", "ACROSS", "STEP_ROW", "STEP_COLUMN", "PAD_ROW", "PAD_COLUMN", "APART_ROW", "APART_COLUMN")
VALUES = 1024  # of a program's tile


def channels_of_tile(n_channels: int) -> int:
    """Channels that divide a row of the map leave no thread idle."""
    return min(128, max(16, n_channels & -n_channels))


@triton.jit
def tap_point(
    offset, token, tap, live, offset_image, offset_channel, offset_row, offset_column, out_height, out_width,
    height, width, ACROSS: tl.constexpr, STEP_ROW: tl.constexpr, STEP_COLUMN: tl.constexpr, PAD_ROW: tl.constexpr,
    PAD_COLUMN: tl.constexpr, APART_ROW: tl.constexpr, APART_COLUMN: tl.constexpr,
):  # fmt: skip
    """Image, row and column at which a tap of a token reads, and where its displacement lies in `offset`."""
    column = token % out_width
    row = (token // out_width) % out_height
    image = token // (out_width * out_height)
    place = image.to(tl.int64) * offset_image + 2 * tap * offset_channel + row * offset_row + column * offset_column
    down = tl.load(offset + place, mask=live, other=0.0).to(tl.float32)
    right = tl.load(offset + place + offset_channel, mask=live, other=0.0).to(tl.float32)
    y = (row * STEP_ROW - PAD_ROW + (tap // ACROSS) * APART_ROW).to(tl.float32) + down
    x = (column * STEP_COLUMN - PAD_COLUMN + (tap % ACROSS) * APART_COLUMN).to(tl.float32) + right
    # Farther out than a pixel all is zero; without a bound a wild offset would overflow the integer below. But what is
    # no number stays none: a model that has gone astray must not look sound.
    y = tl.clamp(y, -2.0, height + 1.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.clamp(x, -2.0, width + 1.0, propagate_nan=tl.PropagateNan.ALL)
    return image, y, x, place


@triton.jit
def corners(image, y, x, live, height, width):
    """The pixel up and left of each point, where the point lies beyond it, and which of the four corners exist."""
    top = tl.floor(y)
    left = tl.floor(x)
    row = top.to(tl.int32)
    column = left.to(tl.int32)
    pixel = (image.to(tl.int64) * height + row) * width + column
    in_top = live & (row >= 0) & (row < height)
    in_bottom = live & (row >= -1) & (row < height - 1)
    in_left = (column >= 0) & (column < width)
    in_right = (column >= -1) & (column < width - 1)
    return (
        pixel, y - top, x - left, in_top & in_left, in_top & in_right, in_bottom & in_left, in_bottom & in_right
    )  # fmt: skip


@triton.jit
def sample_kernel(
    x, offset, samples, grad_samples, grad_offset, points, cells, offset_image, offset_channel, offset_row,
    offset_column, n_taps, n_channels, out_height, out_width, height, width, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, STEP_ROW: tl.constexpr, STEP_COLUMN: tl.constexpr, PAD_ROW: tl.constexpr,
    PAD_COLUMN: tl.constexpr, APART_ROW: tl.constexpr, APART_COLUMN: tl.constexpr, BACKWARD: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Samples of ROWS taps; backward also the gradients of their offsets, their points, and the cells they lie in."""
    TAPS: tl.constexpr = DOWN * ACROSS
    taps = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = taps < n_taps
    image, y, col, place = tap_point(
        offset, taps // TAPS, taps % TAPS, live, offset_image, offset_channel, offset_row, offset_column, out_height,
        out_width, height, width, ACROSS, STEP_ROW, STEP_COLUMN, PAD_ROW, PAD_COLUMN, APART_ROW, APART_COLUMN,
    )  # fmt: skip
    pixel, below, right, in_00, in_01, in_10, in_11 = corners(image, y, col, live, height, width)
    corner = x + pixel * n_channels
    first = taps.to(tl.int64) * n_channels
    grad_down = tl.zeros((ROWS,), tl.float32)
    grad_right = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n_channels, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        within = (channels < n_channels)[None, :]
        at = corner[:, None] + channels[None, :]
        v00 = tl.load(at, mask=in_00[:, None] & within, other=0.0).to(tl.float32)
        v01 = tl.load(at + n_channels, mask=in_01[:, None] & within, other=0.0).to(tl.float32)
        v10 = tl.load(at + width * n_channels, mask=in_10[:, None] & within, other=0.0).to(tl.float32)
        v11 = tl.load(at + (width + 1) * n_channels, mask=in_11[:, None] & within, other=0.0).to(tl.float32)
        here = first[:, None] + channels[None, :]
        upper = v00 + (v01 - v00) * right[:, None]
        lower = v10 + (v11 - v10) * right[:, None]
        sample = upper + (lower - upper) * below[:, None]
        tl.store(samples + here, sample.to(samples.dtype.element_ty), mask=live[:, None] & within)
        if BACKWARD:
            grads = tl.load(grad_samples + here, mask=live[:, None] & within, other=0.0).to(tl.float32)
            grad_down += tl.sum((lower - upper) * grads, 1)
            steep = (v01 - v00) * (1 - below)[:, None] + (v11 - v10) * below[:, None]
            grad_right += tl.sum(steep * grads, 1)
    if BACKWARD:
        tl.store(grad_offset + place, grad_down.to(grad_offset.dtype.element_ty), mask=live)
        tl.store(grad_offset + place + offset_channel, grad_right.to(grad_offset.dtype.element_ty), mask=live)
        tl.store(points + 2 * taps.to(tl.int64), y, mask=live)
        tl.store(points + 2 * taps.to(tl.int64) + 1, col, mask=live)
        row = tl.floor(y).to(tl.int32) + 1
        column = tl.floor(col).to(tl.int32) + 1
        inside = (row >= 0) & (row <= height) & (column >= 0) & (column <= width)
        cell = tl.where(inside, row * (width + 1) + column, (height + 1) * (width + 1))
        tl.store(cells + taps, cell.to(cells.dtype.element_ty), mask=live)


def sample(
    launch: Launcher,
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    geometry: Geometry,
    samples: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Fill `samples`, (tokens, taps·C).

    Args:
        launch: For this call.
        x: Map, (B, H, W, C), contiguous.
        offset: (B, 2·taps, h, w).
        weight: (C_out, C, kernel, kernel), for its size.
        geometry: Of the windows.
        samples: To be filled.
        grads: Backward, dS; and to be filled, d offset, and the points and cells (`collect`) of all taps.
    """
    _, height, width, n_channels = x.shape
    n_taps = samples.numel() // n_channels
    channels = channels_of_tile(n_channels)
    rows = VALUES // channels
    launch(
        sample_kernel,
        (cdiv(n_taps, rows), 1, 1),
        *(x, offset, samples, *(grads or (samples, samples, samples, samples))),
        *(*offset.stride(), n_taps, n_channels, *offset.shape[2:], height, width),
        **dict(zip(GEOMETRY, (*weight.shape[2:], *geometry), strict=True)),
        BACKWARD=grads is not None,
        ROWS=rows,
        CHANNELS=channels,
        num_warps=4,
    )
