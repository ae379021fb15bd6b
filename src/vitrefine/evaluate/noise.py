"""Noise and blur (CB, Table 9, after Hendrycks and Dietterich, 2019), on pixels before they are normalised.

Gaussian noise: x + N(0, σ²), σ in levels of 255.
Shot noise: Poisson(λ x)/λ, of λ photons where a pixel is white; the paper gives no λ, 60 is the mildest of ImageNet-C.
Gaussian blur: σ in pixels; the kernel ends after 4 σ, and images are mirrored at their edges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from vitrefine.evaluate.change import Change
from vitrefine.evaluate.draws import each_drawn
from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.subject import Subject

PHOTONS = 60.0
_BLUR_ENDS = 4.0


def blur(pixels: Tensor, sigma: float) -> Tensor:
    """Images (B, C, H, W) blurred."""
    # A mirror has no more than the image itself to show.
    radii = [min(int(_BLUR_ENDS * sigma + 0.5), side - 1) for side in (pixels.shape[-1], pixels.shape[-2])]
    return gaussian_blur(pixels, [2 * radius + 1 for radius in radii], [sigma, sigma]).clamp(0, 1)


@dataclass(frozen=True)
class GaussianNoise(Change):
    """A draw of Gaussian noise for each image."""

    sigma: float
    seed: int = 0
    draw: int = 0

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        noise = each_drawn(
            shown, lambda image, chance: torch.empty_like(image).normal_(generator=chance), self.seed, self.draw
        )
        return (shown.pixels + self.sigma / 255 * noise).clamp(0, 1)


@dataclass(frozen=True)
class ShotNoise(Change):
    """A draw of shot noise for each image."""

    photons: float = PHOTONS
    seed: int = 0
    draw: int = 0

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        counted = each_drawn(
            shown, lambda image, chance: torch.poisson(self.photons * image, generator=chance), self.seed, self.draw
        )
        return (counted / self.photons).clamp(0, 1)


@dataclass(frozen=True)
class Blur(Change):
    """Gaussian blur."""

    sigma: float

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        return blur(shown.pixels, self.sigma)
