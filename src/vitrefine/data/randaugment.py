"""RandAugment for a batch on its device: every image its own operations, no worker processes, no Python loop.

The operations, their strengths and the probability of each are those of timm's "increasing" set, as in
`rand-m9-mstd0.5-inc1` of the DeiT recipe: two rounds, in each of which an image gets one of fifteen operations with
probability one half. A round costs one look-up of colour tables, two blends and one warp for the whole batch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vitrefine.data.colour import (
    autocontrast_table,
    blend_table,
    equalize_table,
    identity_table,
    look_up,
    mean_grey,
    posterize_table,
    saturate,
    sharpen,
    solarize_add_table,
    solarize_table,
)
from vitrefine.data.geometry import warp

OPERATIONS = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "saturation",
    "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
_NUMBER = {name: i for i, name in enumerate(OPERATIONS)}
MAX_LEVEL = 10.0


def rand_augment(
    images: Tensor,
    *,
    magnitude: float = 9.0,
    magnitude_std: float = 0.5,
    rounds: int = 2,
    p: float = 0.5,
    fill: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Augment uint8 images (B, C, H, W).

    Args:
        images: The batch.
        magnitude: Mean strength, 0 to 10.
        magnitude_std: Its standard deviation from image to image.
        rounds: Operations an image may get.
        p: Probability of each.
        fill: Colour (C,) of what comes in from outside; black if None.
        generator: Source of randomness, on the images' device.
    """
    draw: dict[str, Any] = {"device": images.device, "generator": generator}
    for _ in range(rounds):
        operation = torch.randint(len(OPERATIONS), (len(images),), **draw)
        operation = operation.masked_fill(torch.rand(len(images), **draw) >= p, -1)
        level = (magnitude + magnitude_std * torch.randn(len(images), **draw)).clamp(0, MAX_LEVEL) / MAX_LEVEL
        sign = torch.rand(len(images), **draw).lt(0.5).float() * 2 - 1
        images = apply_operations(images, operation, level, sign, fill=fill)
    return images


def apply_operations(
    images: Tensor, operation: Tensor, level: Tensor, sign: Tensor, *, fill: Tensor | None = None
) -> Tensor:
    """One operation an image: its number in `OPERATIONS` (-1: none), its level in 0..1 and its direction ±1."""
    factor = (1 + sign * 0.9 * level).clamp(min=0.1)
    images = look_up(images, _table(images, operation, level, factor))
    for name, blend in (("saturation", saturate), ("sharpness", sharpen)):
        chosen = (operation == _NUMBER[name])[:, None, None, None]
        images = torch.where(chosen, blend(images, factor), images)
    moved = warp(images, _matrix(images, operation, level * sign), fill=fill)
    geometric = operation[:, None].eq(torch.tensor(_GEOMETRIC, device=images.device)).any(dim=1)
    return torch.where(geometric[:, None, None, None], moved, images)


_GEOMETRIC = [_NUMBER[n] for n in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")]


def _table(images: Tensor, operation: Tensor, level: Tensor, factor: Tensor) -> Tensor:
    tables = {
        "autocontrast": autocontrast_table(images),
        "equalize": equalize_table(images),
        "invert": 255 - identity_table(images),
        "posterize": posterize_table(images, 4 - (4 * level).floor()),
        "solarize": solarize_table(images, 256 - (256 * level).floor()),
        "solarize_add": solarize_add_table(images, (110 * level).floor().clamp(max=128)),
        "contrast": blend_table(mean_grey(images), images, factor),
        "brightness": blend_table(torch.zeros_like(level), images, factor),
    }
    table = identity_table(images)
    for name, made in tables.items():
        table = torch.where((operation == _NUMBER[name])[:, None, None], made, table)
    return table


def _matrix(images: Tensor, operation: Tensor, amount: Tensor) -> Tensor:
    """The affine map of each image; the identity for operations that move nothing."""
    _, _, height, width = images.shape

    def of(name: str, most: float) -> Tensor:
        return torch.where(operation == _NUMBER[name], amount * most, 0)

    angle = of("rotate", math.radians(30))
    matrix = torch.zeros(len(images), 2, 3, device=images.device)
    # Coordinates run from -1 to 1 on both axes, so what mixes them carries the ratio of the sides.
    matrix[:, 0, 0], matrix[:, 1, 1] = angle.cos(), angle.cos()
    matrix[:, 0, 1] = (angle.sin() + of("shear_x", 0.3)) * (height / width)
    matrix[:, 1, 0] = (-angle.sin() + of("shear_y", 0.3)) * (width / height)
    matrix[:, 0, 2], matrix[:, 1, 2] = 2 * of("translate_x", 0.45), 2 * of("translate_y", 0.45)
    return matrix
