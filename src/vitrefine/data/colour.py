"""Changing the colours of a batch, every image by its own operation, as tables and blends.

An operation that looks at one value at a time (brightness, contrast, posterize, solarize, invert, autocontrast,
equalize) is a table of 256 entries for each image and channel: tables are built for all images at once and looked up
once, whatever the operations are. Saturation and sharpness are blends of an image with a grey or a smoothed copy.
The results are those of Pillow's ImageOps and ImageEnhance.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GREY = (0.299, 0.587, 0.114)


def grey(images: Tensor) -> Tensor:
    """Luminance (B, 1, H, W) of uint8 images, in uint8 as Pillow rounds it."""
    if images.shape[1] == 1:
        return images
    weight = torch.tensor([19595, 38470, 7471], device=images.device).view(1, 3, 1, 1)
    return ((images.int() * weight).sum(dim=1, keepdim=True) + 0x8000 >> 16).to(torch.uint8)


def identity_table(images: Tensor) -> Tensor:
    """(B, C, 256), every value its own."""
    return torch.arange(256, device=images.device).expand(*images.shape[:2], 256).float()


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Replace each value by its entry in the table of its image and channel."""
    return table.to(torch.uint8).gather(2, images.flatten(2).long()).view_as(images)


def blend_table(start: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Brightness and contrast: from the constant `start` (B,) through the image (factor 1) and beyond."""
    start, factor = start[:, None, None], factor[:, None, None]
    return (start + factor * (identity_table(images) - start)).clamp(0, 255).floor()


def mean_grey(images: Tensor) -> Tensor:
    """The level (B,) that contrast turns around."""
    return (grey(images).float().mean(dim=(1, 2, 3)) + 0.5).floor()


def posterize_table(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper `bits` (B,) of each value."""
    step = (2.0 ** (8 - bits.float()))[:, None, None]
    return (identity_table(images) / step).floor() * step


def solarize_table(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert values from `threshold` (B,) on."""
    value = identity_table(images)
    return torch.where(value < threshold[:, None, None], value, 255 - value)


def solarize_add_table(images: Tensor, added: Tensor) -> Tensor:
    """Add to values below 128."""
    value = identity_table(images)
    return torch.where(value < 128, (value + added[:, None, None]).clamp(max=255), value)


def autocontrast_table(images: Tensor) -> Tensor:
    """Stretch each channel to the whole range; a channel of one value stays."""
    low = images.flatten(2).amin(dim=2, keepdim=True).float()
    high = images.flatten(2).amax(dim=2, keepdim=True).float()
    scale = 255.0 / (high - low).clamp(min=1)
    stretched = (identity_table(images) * scale - low * scale).floor().clamp(0, 255)
    return torch.where(high > low, stretched, identity_table(images))


def equalize_table(images: Tensor) -> Tensor:
    """Make each channel's histogram as even as a table can."""
    flat = images.flatten(2).long()
    histogram = torch.zeros(*images.shape[:2], 256, device=images.device)
    histogram.scatter_add_(2, flat, torch.ones(1, device=images.device).expand(flat.shape))
    last = histogram.gather(2, flat.amax(dim=2, keepdim=True))
    step = ((histogram.sum(dim=2, keepdim=True) - last) / 255).floor()
    before = histogram.cumsum(dim=2) - histogram
    evened = ((before + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(0, 255)
    return torch.where(step > 0, evened, identity_table(images))


def _blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    mixed = other.float() + factor[:, None, None, None] * (images.float() - other.float())
    return mixed.clamp(0, 255).floor().to(torch.uint8)


def saturate(images: Tensor, factor: Tensor) -> Tensor:
    """From grey (0) through the image (1) and beyond, by `factor` (B,)."""
    return _blend(grey(images).expand_as(images), images, factor)


def sharpen(images: Tensor, factor: Tensor) -> Tensor:
    """From smoothed (0) through the image (1) and beyond; the outermost pixels stay."""
    # Pillow's kernel, 5 in the middle and 1 around it, over 13; sums of shifts, which a compiler fuses into the blend.
    value = images.int()
    rows = value[..., :-2, :] + value[..., 1:-1, :] + value[..., 2:, :]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    middle = value[..., 1:-1, 1:-1]
    inner = (2 * (around + 4 * middle) + 13) // 26
    changed = _blend(inner, middle, factor)
    border = F.pad(torch.zeros_like(middle, dtype=torch.bool), (1, 1, 1, 1), value=True)
    return torch.where(border, images, F.pad(changed, (1, 1, 1, 1)))
