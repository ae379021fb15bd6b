"""Moving the pixels of a batch, every image by its own random amount, on whatever device the batch is.

Images are uint8 (B, C, H, W) throughout: a quarter of the memory traffic of floats, and the form the colour tables
of RandAugment work on.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def random_flip(images: Tensor, generator: torch.Generator | None = None, p: float = 0.5) -> Tensor:
    """Mirror each image left to right with probability p."""
    chosen = torch.rand(len(images), device=images.device, generator=generator) < p
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def random_crop(images: Tensor, padding: int, generator: torch.Generator | None = None, fill: int = 0) -> Tensor:
    """Shift each image by up to `padding` pixels each way; what comes in from outside is `fill`."""
    batch, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4, value=fill)
    draw: dict[str, Any] = {"device": images.device, "generator": generator}
    row = torch.randint(2 * padding + 1, (batch, 1), **draw) + torch.arange(height, device=images.device)
    column = torch.randint(2 * padding + 1, (batch, 1), **draw) + torch.arange(width, device=images.device)
    pixel = row[:, :, None] * padded.shape[-1] + column[:, None, :]
    return padded.flatten(2).gather(2, pixel.flatten(1)[:, None].expand(-1, channels, -1)).view_as(images)


def random_resized_crop(
    images: Tensor,
    size: tuple[int, int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Cut a box of random area and shape out of each image and resize it (bilinear) to `size`."""
    batch, _, height, width = images.shape
    draw = torch.rand(4, batch, device=images.device, generator=generator)
    area = scale[0] + (scale[1] - scale[0]) * draw[0]
    shape = torch.exp(torch.log(torch.tensor(ratio, device=images.device)).diff() * draw[1]) * ratio[0]
    # As shares of the image's sides; a box that would stick out is as long as the image.
    box_width = (area * shape * height / width).sqrt().clamp(max=1)
    box_height = (area / shape * width / height).sqrt().clamp(max=1)
    matrix = torch.zeros(batch, 2, 3, device=images.device)
    matrix[:, 0, 0], matrix[:, 1, 1] = box_width, box_height
    matrix[:, 0, 2], matrix[:, 1, 2] = (2 * draw[2] - 1) * (1 - box_width), (2 * draw[3] - 1) * (1 - box_height)
    return warp(images, matrix, size=size, outside="border")


def warp(
    images: Tensor,
    matrix: Tensor,
    *,
    size: tuple[int, int] | None = None,
    fill: Tensor | None = None,
    outside: str = "zeros",
) -> Tensor:
    """Read each image at the points that its (2, 3) matrix gives, in coordinates that run from -1 to 1.

    Args:
        images: uint8 (B, C, H, W).
        matrix: One affine map an image, from a point of the result to a point of the image.
        size: Height and width of the result; as the images if None.
        fill: Colour (C,) of what lies outside, with `outside="zeros"`.
        outside: `zeros` or `border`.
    """
    batch, channels, height, width = images.shape
    grid = F.affine_grid(matrix, [batch, channels, *(size or (height, width))], align_corners=False)
    # Read relative to the fill, so that zero outside means the fill.
    base = 0 if fill is None else fill.view(1, -1, 1, 1).to(matrix.dtype)
    read = F.grid_sample(images.to(matrix.dtype) - base, grid, padding_mode=outside, align_corners=False)
    return (read + base).round().clamp(0, 255).to(torch.uint8)
