"""RandAugment for a batch on its device: every image its own operations, no worker processes, no Python loop.

The operations, their strengths and the probability of each are those of timm's "increasing" set, as in
`rand-m9-mstd0.5-inc1` of the DeiT recipe: two rounds, in each of which an image gets one of fifteen operations with
probability one half. A round is one look-up of colour tables, two blends and one warp, each of
about as many images as drew it.
"""

import math
from collections.abc import Callable

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
from vitrefine.data.draws import Draws, normal
from vitrefine.data.geometry import warp

OPERATIONS = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "saturation",
    "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
_NUMBER = {name: i for i, name in enumerate(OPERATIONS)}
MAX_LEVEL = 10.0
ROUNDS = 2
PROBABILITY = 0.5  # of an operation in each round
RAND_AUGMENT_DRAWS = 4 * ROUNDS


def rand_augment(
    images: Tensor,
    draws: Draws,
    *,
    magnitude: float = 9.0,
    magnitude_std: float = 0.5,
    fill: Tensor | None = None,
) -> Tensor:
    """Augment uint8 images (B, C, H, W).

    Args:
        images: The batch.
        draws: Random numbers of the batch.
        magnitude: Mean strength, 0 to 10.
        magnitude_std: Its standard deviation from image to image.
        fill: Colour (C,) of what comes in from outside; black if None.
    """
    for _ in range(ROUNDS):
        which, happens, strength, side = draws.take(4)
        operation = (which * len(OPERATIONS)).long().masked_fill(happens >= PROBABILITY, -1)
        level = (magnitude + magnitude_std * normal(strength)).clamp(0, MAX_LEVEL) / MAX_LEVEL
        sign = side.lt(0.5).float() * 2 - 1
        images = apply_operations(images, operation, level, sign, fill=fill, share=PROBABILITY / len(OPERATIONS))
    return images


Change = Callable[[Tensor, Tensor], Tensor]
"""Makes changed images out of some images and their numbers in the batch."""


def apply_operations(
    images: Tensor,
    operation: Tensor,
    level: Tensor,
    sign: Tensor,
    *,
    fill: Tensor | None = None,
    share: float = 1.0,
) -> Tensor:
    """One operation an image.

    Args:
        images: uint8 (B, C, H, W).
        operation: Its number (B,) in `OPERATIONS`; -1 for none.
        level: Strength (B,) in 0..1.
        sign: Direction (B,), 1 or -1.
        fill: Colour (C,) of what comes in from outside; black if None.
        share: Probability with which each operation was drawn; saves work on a device.
    """
    factor = (1 + sign * 0.9 * level).clamp(min=0.1)

    def coloured(some: Tensor, rows: Tensor) -> Tensor:
        return look_up(some, _table(some, operation[rows], level[rows], factor[rows]))

    def moved(some: Tensor, rows: Tensor) -> Tensor:
        return warp(some, _matrix(some, operation[rows], (level * sign)[rows]), fill=fill)

    changes: dict[tuple[str, ...], Change] = {
        _COLOUR: coloured,
        ("saturation",): lambda some, rows: saturate(some, factor[rows]),
        ("sharpness",): lambda some, rows: sharpen(some, factor[rows]),
        _GEOMETRIC: moved,
    }
    for names, change in changes.items():
        chosen = torch.stack([operation == _NUMBER[name] for name in names]).any(dim=0)
        if images.device.type == "cpu":
            images = _change(images, chosen, change)
        else:
            images = _change_unseen(images, chosen, change, _room(len(images), share * len(names)))
    return images


_COLOUR = ("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add", "contrast", "brightness")
_GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def _change(images: Tensor, chosen: Tensor, change: Change) -> Tensor:
    """Change the chosen images."""
    rows = chosen.nonzero()[:, 0]
    return images.index_copy(0, rows, change(images[rows], rows)) if len(rows) else images


def _change_unseen(images: Tensor, chosen: Tensor, change: Change, room: int) -> Tensor:
    """Change the chosen images, at most `room` of them, without asking the device how many they are."""
    rows = _first_rows(chosen, room)
    some = images[rows]
    return images.index_copy(0, rows, torch.where(chosen[rows, None, None, None], change(some, rows), some))


def _room(images: int, share: float) -> int:
    """Six standard deviations above the mean number of chosen images, and two: one batch in 1e7 may need more."""
    return min(images, math.ceil(images * share + 6 * math.sqrt(images * share)) + 2)


def _first_rows(chosen: Tensor, room: int) -> Tensor:
    """Numbers (room,) of the chosen rows, followed by zeros; what there is no room for is left out."""
    place = chosen.cumsum(dim=0) - 1
    place = torch.where(chosen & (place < room), place, room)
    numbers = torch.arange(len(chosen), device=chosen.device)
    return torch.zeros(room + 1, dtype=torch.long, device=chosen.device).scatter(0, place, numbers)[:room]


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
    # Coordinates run from -1 to 1 on both axes, so what mixes them carries the ratio of the sides.
    along_y = (angle.sin() + of("shear_x", 0.3)) * (height / width)
    along_x = (-angle.sin() + of("shear_y", 0.3)) * (width / height)
    shift_x, shift_y = 2 * of("translate_x", 0.45), 2 * of("translate_y", 0.45)
    cosine = angle.cos()
    return torch.stack([cosine, along_y, shift_x, along_x, cosine, shift_y], dim=1).view(-1, 2, 3)
