"""Chance that belongs to an image: the same whatever batch it comes in, and however often work is taken up again."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrefine.data.order import seed_of
from vitrefine.evaluate.images import Shown


def each_drawn(shown: Shown, draw: Callable[[Tensor, torch.Generator], Tensor], *seed: int) -> Tensor:
    """What `draw` makes of each image (C, H, W), given a generator that starts from the seed and the image's number."""
    generator = torch.Generator(shown.pixels.device)
    drawn = []
    for image, number in zip(shown.pixels, shown.index.tolist(), strict=True):
        generator.manual_seed(seed_of(*seed, number))
        drawn.append(draw(image, generator))
    return torch.stack(drawn)
