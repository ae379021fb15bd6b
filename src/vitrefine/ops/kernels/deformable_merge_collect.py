"""The gradient of a map out of those of its samples: dX(p) = Σ over the taps that read pixel p of their weight · dS.

Scattering dS to pixels would add in whatever order threads arrive. Instead the taps of an image are sorted by the cell
between four pixels in which they fell, and each pixel collects the taps of the four cells around it, in order: any
offset is served, and the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.deformable_merge_sample import VALUES, channels_of_tile
from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.shapes import cdiv


@triton.jit
def collect_kernel(
    grad_samples, points, order, starts, grad_x, n_pixels, n_taps, n_channels, height, width, PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of PIXELS pixels: what the taps in the four cells around each of them hand back, in order."""
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = (channels < n_channels)[None, :]
    live = pixels < n_pixels
    column = pixels % width
    row = (pixels // width) % height
    image = (pixels // (width * height)).to(tl.int64)
    cell = starts + image * ((height + 1) * (width + 1) + 1) + row * (width + 1) + column
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    # The two cells above a pixel follow each other in the sorted list, so do the two below.
    for _ in tl.static_range(2):
        first = tl.load(cell, mask=live, other=0)
        last = tl.load(cell + 2, mask=live, other=0)
        for step in range(tl.max(last - first)):
            some = first + step < last
            tap = image * n_taps + tl.load(order + image * n_taps + first + step, mask=some, other=0)
            far_row = tl.abs(tl.load(points + 2 * tap, mask=some, other=0.0) - row.to(tl.float32))
            far_column = tl.abs(tl.load(points + 2 * tap + 1, mask=some, other=0.0) - column.to(tl.float32))
            share = tl.maximum(1 - far_row, 0.0) * tl.maximum(1 - far_column, 0.0)
            at = grad_samples + tap[:, None] * n_channels + channels[None, :]
            total += share[:, None] * tl.load(at, mask=some[:, None] & within, other=0.0).to(tl.float32)
        cell += width + 1
    tl.store(
        grad_x + pixels.to(tl.int64)[:, None] * n_channels + channels[None, :],
        total.to(grad_x.dtype.element_ty),
        mask=live[:, None] & within,
    )


def count_cells(height: int, width: int) -> int:
    """Of a map, those that reach over its edge included."""
    return (height + 1) * (width + 1)


def collect(launch: Launcher, x: Tensor, grad_samples: Tensor, points: Tensor, cells: Tensor) -> Tensor:
    """Gradient of the map.

    Args:
        launch: For this call.
        x: Map, (B, H, W, C), contiguous.
        grad_samples: dS, (tokens, taps·C).
        points: Row and column of each tap, (B·taps of an image, 2).
        cells: In which they lie, (B, taps of an image); `count_cells` for a tap outside of the map.
    """
    batch, height, width, n_channels = x.shape
    n_taps, n_pixels = cells.shape[1], batch * height * width
    cells, order = torch.sort(cells, dim=1, stable=True)
    every_cell = torch.arange(count_cells(height, width) + 1, device=x.device, dtype=cells.dtype).repeat(batch, 1)
    starts = torch.searchsorted(cells, every_cell, out_int32=True)
    grad_x = torch.empty_like(x)
    channels = channels_of_tile(n_channels)
    pixels = VALUES // channels
    launch(
        collect_kernel,
        (cdiv(n_pixels, pixels), cdiv(n_channels, channels), 1),
        *(grad_samples, points, order, starts, grad_x),
        *(n_pixels, n_taps, n_channels, height, width),
        PIXELS=pixels,
        CHANNELS=channels,
        num_warps=2,
    )
    return grad_x
