"""Mixup, CutMix and random erasing of a batch, each image by its own draw, on the batch's device."""

import math

import torch
from torch import Tensor

from vitrefine.data.draws import Draws

_TRIES = 16
MIX_DRAWS = 4 + 2 * 2 * _TRIES
ERASE_DRAWS = 5


def soft_labels(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot labels (B, classes), a share of each spread over all classes."""
    right = labels[:, None] == torch.arange(classes, device=labels.device)
    return right.float() * (1 - smoothing) + smoothing / classes


def mix(
    images: Tensor,
    targets: Tensor,
    draws: Draws,
    *,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    p: float = 1.0,
    switch: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Mix each image with the one opposite in the batch, and its target likewise.

    Args:
        images: Normalised images (B, C, H, W).
        targets: Soft labels (B, classes).
        draws: Random numbers of the batch.
        mixup: Parameter, in (0, 1], of the Beta distribution of mixup's weight; 0 for no mixup.
        cutmix: The same for CutMix; 0 for no CutMix.
        p: Probability that an image is mixed at all.
        switch: Probability of CutMix where both are on.
    """
    height, width = images.shape[-2:]
    which, happens = draws.take(2)
    cuts = which < (switch if mixup and cutmix else float(cutmix > 0))
    weight = torch.where(cuts, _beta(cutmix or 1.0, draws), _beta(mixup or 1.0, draws))
    weight = torch.where(happens < p, weight, 1.0)

    boxes = _boxes((1 - weight).sqrt(), height, width, draws.take(2)) * cuts[:, None]
    top, left, bottom, right = boxes.unbind(dim=1)
    weight = torch.where(cuts, 1 - (bottom - top) * (right - left) / (height * width), weight)
    opposite = images.flip(0)
    share = torch.where(cuts, 1.0, weight).to(images.dtype)[:, None, None, None]
    blended = share * images + (1 - share) * opposite
    mixed = torch.where(_inside(boxes, height, width)[:, None], opposite, blended)
    return mixed, weight[:, None] * targets + (1 - weight[:, None]) * targets.flip(0)


def _beta(alpha: float, draws: Draws) -> Tensor:
    """Beta(α, α) by Jöhnk's two powers where α ≤ 1, which is where it is used; uniform numbers suffice for it."""
    unit = draws.take(2 * _TRIES)
    if alpha == 1:
        return unit[0]
    # U^(1/α) / (U^(1/α) + V^(1/α)), accepted where the sum is at most one; sixteen tries leave about one in 1e6.
    u, v = unit.pow(1 / alpha).view(2, _TRIES, -1)
    total = u + v
    first = (total <= 1).int().argmax(dim=0, keepdim=True)
    return (u / total.clamp(min=1e-12)).gather(0, first)[0]


def _boxes(side: Tensor, height: int, width: int, centre: Tensor) -> Tensor:
    """Boxes (B, 4) whose sides are `side` (B,) of the image's, around a random centre, clipped at the edges."""
    row, column = (centre[0] * height).floor(), (centre[1] * width).floor()
    half_height, half_width = (side * height / 2).floor(), (side * width / 2).floor()
    top, left = (row - half_height).clamp(min=0), (column - half_width).clamp(min=0)
    bottom, right = (row + half_height).clamp(max=height), (column + half_width).clamp(max=width)
    return torch.stack([top, left, bottom, right], dim=1).long()


def _inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Masks (B, H, W) of boxes (B, 4)."""
    row, column = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    top, left, bottom, right = boxes[:, :, None].unbind(dim=1)
    return ((row >= top) & (row < bottom))[:, :, None] & ((column >= left) & (column < right))[:, None, :]


def random_erase(
    images: Tensor,
    noise: Tensor,
    draws: Draws,
    *,
    p: float = 0.25,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: float = 0.3,
) -> Tensor:
    """Fill a random box of some normalised images with noise, a value a pixel (`noise` is as large as the images)."""
    height, width = images.shape[-2:]
    unit = draws.take(5)
    size = area[0] + (area[1] - area[0]) * unit[0]
    shape = torch.exp((2 * unit[1] - 1) * -math.log(ratio))
    box_height = (size * height * width * shape).sqrt().clamp(max=height - 1).round()
    box_width = (size * height * width / shape).sqrt().clamp(max=width - 1).round()
    top, left = (unit[2] * (height - box_height + 1)).floor(), (unit[3] * (width - box_width + 1)).floor()
    boxes = torch.stack([top, left, top + box_height, left + box_width], dim=1) * (unit[4] < p)[:, None]
    return torch.where(_inside(boxes, height, width)[:, None], noise, images)
