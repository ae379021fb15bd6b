"""Deformable merging as one differentiable operator that keeps no sampled map, its backward pass without atomics.

With S the (tokens, taps·C) samples of the map, W the weights and O = S Wᵀ:

    forward    S, then O                                                          (`sample_kernel`, then the library)
    backward   dS = dO W; S again, dW = dOᵀ S                                     (the same)
               d offset: dS times the differences between corners                 (`sample_kernel`)
               dX(p) = Σ over the taps that read pixel p of bilinear weight · dS  (`collect_kernel`)

Scattering dS to pixels would add in whatever order threads arrive. Instead the taps of an image are sorted by the cell
between four pixels in which they fell, and each pixel collects the taps of the four cells around it, in order: any
offset is served, and the same inputs give the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.kernels.launch import Launcher, on_its_device

Geometry = list[int]  # stride, padding, dilation; down and across of each
GEOMETRY = ("DOWN", "ACROSS", "STEP_ROW", "STEP_COLUMN", "PAD_ROW", "PAD_COLUMN", "APART_ROW", "APART_COLUMN")


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
    # Farther out than a pixel all is zero; without a bound a wild offset would overflow the integer below.
    y = tl.minimum(tl.maximum(y, -2.0), height + 1.0)
    x = tl.minimum(tl.maximum(x, -2.0), width + 1.0)
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
    for _ in tl.static_range(
        2
    ):  # the two cells above a pixel follow each other in the sorted list, so do the two below
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


def _packed(weight: Tensor) -> Tensor:
    """(C_out, taps·C): as a token's samples lie."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def _dense(offset: Tensor) -> Tensor:
    """Offsets whose gradient can have the same strides: not expanded, say."""
    return offset if offset.is_contiguous(memory_format=torch.channels_last) else offset.contiguous()


def _tile(kernel: str, n_channels: int) -> tuple[int, int, int]:
    """Rows, channels and warps of a program; channels that divide a row of the map leave no thread idle."""
    channels = min(128, max(16, n_channels & -n_channels))
    return 1024 // channels, channels, {"sample": 4, "collect": 2}[kernel]


def _sample(
    launch: Launcher,
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    geometry: Geometry,
    samples: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    _, height, width, n_channels = x.shape
    n_taps = samples.numel() // n_channels
    rows, channels, warps = _tile("sample", n_channels)
    launch(
        sample_kernel,
        (triton.cdiv(n_taps, rows), 1, 1),
        x,
        offset,
        samples,
        *(grads or (samples, samples, samples, samples)),
        *offset.stride(),
        n_taps,
        n_channels,
        *offset.shape[2:],
        height,
        width,
        **dict(zip(GEOMETRY, (*weight.shape[2:], *geometry), strict=True)),
        BACKWARD=grads is not None,
        ROWS=rows,
        CHANNELS=channels,
        num_warps=warps,
    )


@torch.library.custom_op("vitrefine::deformable_merge", mutates_args=())
@on_its_device
def _forward(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    x, packed = x.contiguous(), _packed(weight)
    samples = x.new_empty((x.shape[0], *offset.shape[2:], packed.shape[1]))
    launch = Launcher("deformable_merge", [x, offset, weight], *geometry)
    _sample(launch, x, offset, weight, geometry, samples)
    return F.linear(samples, packed, bias)


@torch.library.custom_op("vitrefine::deformable_merge_backward", mutates_args=())
@on_its_device
def _backward(
    grad: Tensor, x: Tensor, offset: Tensor, weight: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the map, the offsets and the weights."""
    x, offset, grad, packed = x.contiguous(), _dense(offset), grad.reshape(-1, weight.shape[0]), _packed(weight)
    batch, height, width, n_channels = x.shape
    n_taps = offset[0, 0].numel() * weight[0, 0].numel()
    n_cells = (height + 1) * (width + 1)

    grad_samples = grad @ packed
    samples, grad_offset = torch.empty_like(grad_samples), torch.empty_like(offset)
    points = x.new_empty((batch * n_taps, 2), dtype=torch.float32)
    cells = x.new_empty((batch, n_taps), dtype=torch.int16 if n_cells < 2**15 else torch.int32)
    launch = Launcher("deformable_merge_backward", [x, offset, weight], *geometry)
    _sample(launch, x, offset, weight, geometry, samples, (grad_samples, grad_offset, points, cells))
    grad_weight = (grad.T @ samples).view(-1, *weight.shape[2:], n_channels).permute(0, 3, 1, 2).contiguous()

    cells, order = torch.sort(cells, dim=1, stable=True)
    every_cell = torch.arange(n_cells + 1, device=x.device, dtype=cells.dtype).repeat(batch, 1)
    starts = torch.searchsorted(cells, every_cell, out_int32=True)
    grad_x = torch.empty_like(x)
    n_pixels = batch * height * width
    pixels, channels, warps = _tile("collect", n_channels)
    launch(
        collect_kernel,
        (triton.cdiv(n_pixels, pixels), triton.cdiv(n_channels, channels), 1),
        grad_samples,
        points,
        order,
        starts,
        grad_x,
        n_pixels,
        n_taps,
        n_channels,
        height,
        width,
        PIXELS=pixels,
        CHANNELS=channels,
        num_warps=warps,
    )
    return grad_x, grad_offset, grad_weight


@_forward.register_fake
def _(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    return x.new_empty((x.shape[0], *offset.shape[2:], weight.shape[0]))


@_backward.register_fake
def _(grad: Tensor, x: Tensor, offset: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(_dense(offset)), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, offset, weight, bias, ctx.geometry = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, offset, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    # In two steps: the library sums over everything at once with too few threads.
    grad_bias = grad.sum((1, 2), dtype=torch.float32).sum(0).to(grad.dtype) if ctx.has_bias else None
    return *_backward(grad, *ctx.saved_tensors, ctx.geometry), grad_bias, None


_forward.register_autograd(_differentiate, setup_context=_save)


def deformable_merge_triton(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """`deformable_merge` without groups: nothing is kept for the backward pass but the inputs.

    Args:
        x: Map, (B, H, W, C); float16, bfloat16 or float32.
        offset: Displacements in pixels, (B, 2·taps, h, w), in any of these types.
        weight: (C_out, C, kernel, kernel), in the type of the map.
        bias: (C_out,).
        stride: Pixels from one window to the next; the kernel's size if None.
        padding: Pixels by which the first window lies outside.
        dilation: Pixels from one tap to the next.

    Returns:
        (B, h, w, C_out).
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if x.dtype not in kinds or weight.dtype != x.dtype or offset.dtype not in kinds:
        raise UserError(
            f"the merging kernel takes a map and weights of one type, half or single precision, not {x.dtype} and "
            f"{weight.dtype} with offsets in {offset.dtype}; cast them or use impl='reference'"
        )
    taps = weight.shape[2] * weight.shape[3]
    if offset.shape[:2] != (x.shape[0], 2 * taps):
        raise UserError(
            f"{x.shape[0]} maps merged by {taps} taps need offsets of ({x.shape[0]}, {2 * taps}, …), not "
            f"{tuple(offset.shape)}"
        )
    if weight.shape[1] != x.shape[-1]:
        raise UserError(
            f"the merging kernel mixes all channels, but a map of {x.shape[-1]} meets weights of {weight.shape[1]}; "
            "use impl='reference' for groups"
        )
    pairs = (tuple(weight.shape[2:]) if stride is None else stride, padding, dilation)
    geometry = [length for pair in pairs for length in ((pair, pair) if isinstance(pair, int) else pair)]
    return _forward(x, offset, weight, bias, geometry)
