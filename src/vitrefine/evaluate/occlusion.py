"""Centre occlusion (CB, Section 4.6, Table 8): "we zero-mask the center 112 × 112 patches of every validation image".

Half of each side, that is, of images of 224 × 224. The paper does not say whether the mask is zero before images are
normalised, which is black, or after, which is the mean colour. It masks *images*, so black is our reading (it is also
what the Refiner's zero padding is); the mean colour is there to compare.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrefine.evaluate.change import Change
from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.subject import Subject


def occlude(pixels: Tensor, share: float = 0.5, fill: Tensor | float = 0.0) -> Tensor:
    """Hide the middle of images (B, C, H, W).

    Args:
        pixels: Left as they are; the result is new.
        share: Of each side.
        fill: What is seen there instead, a number or a colour (C, 1, 1).
    """
    height, width = (round(share * side) for side in pixels.shape[-2:])
    top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
    hidden = pixels.clone()
    hidden[..., top : top + height, left : left + width] = fill
    return hidden


@dataclass(frozen=True)
class Occlusion(Change):
    """The middle of images hidden."""

    share: float = 0.5
    fill: Literal["black", "mean"] = "black"

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        mean = torch.tensor(subject.mean, device=shown.pixels.device)[:, None, None]
        return occlude(shown.pixels, self.share, 0.0 if self.fill == "black" else mean)
