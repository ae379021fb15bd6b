"""Mixup, CutMix and random erasing of a batch, each image by its own draw, on the batch's device."""

from typing import Any

import torch
from torch import Tensor


def soft_labels(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot labels (B, classes), a share of each spread over all classes."""
    target = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return target.scatter_(1, labels[:, None], 1 - smoothing + smoothing / classes)


def mix(
    images: Tensor,
    targets: Tensor,
    *,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    p: float = 1.0,
    switch: float = 0.5,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix each image with the one opposite in the batch, and its target likewise.

    Args:
        images: Normalised images (B, C, H, W).
        targets: Soft labels (B, classes).
        mixup: Parameter of the Beta distribution of mixup's weight; 0 for no mixup.
        cutmix: The same for CutMix; 0 for no CutMix.
        p: Probability that an image is mixed at all.
        switch: Probability of CutMix where both are on.
        generator: Source of randomness, on the images' device.
    """
    if mixup == 0 and cutmix == 0:
        return images, targets
    batch, _, height, width = images.shape
    draw: dict[str, Any] = {"device": images.device, "generator": generator}
    cuts = torch.rand(batch, **draw) < (switch if mixup and cutmix else float(cutmix > 0))
    weight = torch.where(cuts, _beta(cutmix or 1.0, batch, draw), _beta(mixup or 1.0, batch, draw))
    weight = torch.where(torch.rand(batch, **draw) < p, weight, 1.0)

    box = _boxes((1 - weight).sqrt(), height, width, torch.rand(2, batch, **draw))
    weight = torch.where(cuts, 1 - box.flatten(1).float().mean(dim=1), weight)
    opposite = images.flip(0)
    share = weight.to(images.dtype)[:, None, None, None]
    inside = (box & cuts[:, None, None])[:, None]
    blended = torch.where(cuts[:, None, None, None], images, share * images + (1 - share) * opposite)
    mixed = torch.where(inside, opposite, blended)
    return mixed, weight[:, None] * targets + (1 - weight[:, None]) * targets.flip(0)


def _beta(alpha: float, count: int, draw: dict[str, Any]) -> Tensor:
    """Beta(α, α) by Jöhnk's two powers where α ≤ 1, which is where it is used; a generator can seed it."""
    if alpha == 1:
        return torch.rand(count, **draw)
    # U^(1/α) / (U^(1/α) + V^(1/α)), accepted where the sum is at most one; sixteen tries leave about one in 1e6.
    u, v = torch.rand(2, 16, count, **draw).pow(1 / alpha)
    total = u + v
    accepted = total <= 1
    first = accepted.int().argmax(dim=0, keepdim=True)
    return (u / total.clamp(min=1e-12)).gather(0, first)[0]


def _boxes(side: Tensor, height: int, width: int, centre: Tensor) -> Tensor:
    """Boxes (B, H, W) whose sides are `side` (B,) of the image's, around a random centre, clipped at the edges."""
    row, column = torch.arange(height, device=side.device), torch.arange(width, device=side.device)
    middle_row, middle_column = (centre[0] * height).floor(), (centre[1] * width).floor()
    half_height, half_width = (side * height / 2).floor(), (side * width / 2).floor()
    rows = (row >= (middle_row - half_height)[:, None]) & (row < (middle_row + half_height)[:, None])
    columns = (column >= (middle_column - half_width)[:, None]) & (column < (middle_column + half_width)[:, None])
    return rows[:, :, None] & columns[:, None, :]


def random_erase(
    images: Tensor,
    *,
    p: float = 0.25,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: float = 0.3,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill a random box of some normalised images with noise, a value a pixel."""
    batch, _, height, width = images.shape
    draw: dict[str, Any] = {"device": images.device, "generator": generator}
    unit = torch.rand(5, batch, **draw)
    size = area[0] + (area[1] - area[0]) * unit[0]
    shape = torch.exp((2 * unit[1] - 1) * -torch.log(torch.tensor(ratio, device=images.device)))
    box_height = (size * height * width * shape).sqrt().clamp(max=height - 1).round()
    box_width = (size * height * width / shape).sqrt().clamp(max=width - 1).round()
    top, left = (unit[2] * (height - box_height + 1)).floor(), (unit[3] * (width - box_width + 1)).floor()
    row, column = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    rows = (row >= top[:, None]) & (row < (top + box_height)[:, None])
    columns = (column >= left[:, None]) & (column < (left + box_width)[:, None])
    chosen = (unit[4] < p)[:, None, None] & rows[:, :, None] & columns[:, None, :]
    noise = torch.randn(images.shape, dtype=images.dtype, **draw)
    return torch.where(chosen[:, None], noise, images)
