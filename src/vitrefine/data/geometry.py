"""Moving the pixels of a batch, every image by its own random amount, on whatever device the batch is.

Images are uint8 (B, C, H, W) throughout: a quarter of the memory traffic of floats, and the form the colour tables
of RandAugment work on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.data.draws import Draws

FLIP_DRAWS, CROP_DRAWS, RESIZED_CROP_DRAWS = 1, 2, 4


def random_flip(images: Tensor, draws: Draws, p: float = 0.5) -> Tensor:
    """Mirror each image left to right with probability p."""
    chosen = draws.one() < p
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def random_crop(images: Tensor, padding: int, draws: Draws, fill: int = 0) -> Tensor:
    """Shift each image by up to `padding` pixels each way; what comes in from outside is `fill`."""
    _, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4, value=fill)
    shift = (draws.take(2) * (2 * padding + 1)).long()[:, :, None]
    row = shift[0] + torch.arange(height, device=images.device)
    column = shift[1] + torch.arange(width, device=images.device)
    pixel = row[:, :, None] * padded.shape[-1] + column[:, None, :]
    return padded.flatten(2).gather(2, pixel.flatten(1)[:, None].expand(-1, channels, -1)).view_as(images)


def random_resized_crop(
    images: Tensor,
    size: tuple[int, int],
    draws: Draws,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Cut a box of random area and shape out of each image and resize it (bilinear) to `size`."""
    batch, _, height, width = images.shape
    unit = draws.take(4)
    area = scale[0] + (scale[1] - scale[0]) * unit[0]
    shape = ratio[0] * (ratio[1] / ratio[0]) ** unit[1]
    # As shares of the image's sides; a box that would stick out is as long as the image.
    box_width = (area * shape * height / width).sqrt().clamp(max=1)
    box_height = (area / shape * width / height).sqrt().clamp(max=1)
    zero = torch.zeros_like(area)
    matrix = torch.stack(
        [box_width, zero, (2 * unit[2] - 1) * (1 - box_width), zero, box_height, (2 * unit[3] - 1) * (1 - box_height)],
        dim=1,
    )
    return warp(images, matrix.view(batch, 2, 3), size=size, outside="border")


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 images, bilinearly, smoothed where they shrink."""
    if images.shape[-2:] == size:
        return images
    resized = F.interpolate(images.float(), size, mode="bilinear", align_corners=False, antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut `size` out of the middle; where the image is smaller, black comes in around it."""
    over = [wanted - side for wanted, side in zip(size, images.shape[-2:], strict=True)]
    top, left = over[0] // 2, over[1] // 2
    return F.pad(images, (left, over[1] - left, top, over[0] - top))


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
