"""The last steps of every batch, on the device: normalise, erase, make soft labels, mix.

Whatever reads images hands over uint8, which is a quarter of the traffic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitrefine.data.draws import Draws
from vitrefine.data.mixing import ERASE_DRAWS, MIX_DRAWS, mix, random_erase, soft_labels
from vitrefine.data.options import Augment

FINISH_DRAWS = ERASE_DRAWS + MIX_DRAWS


@dataclass(frozen=True)
class Finish:
    """Makes what a model sees out of uint8 images and class numbers that are on the device."""

    classes: int
    scale: Tensor  # pixel · scale + shift is (pixel / 255 - mean) / std
    shift: Tensor

    @classmethod
    def of(cls, classes: int, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> "Finish":
        """For images whose channels have these means and standard deviations, on a scale from 0 to 1."""
        spread = torch.tensor(std, dtype=torch.float64)
        scale, shift = 1 / (255 * spread), -torch.tensor(mean, dtype=torch.float64) / spread
        return cls(classes, *(x.float().view(1, -1, 1, 1).to(device) for x in (scale, shift)))

    def normalise(self, images: Tensor) -> Tensor:
        return images.float() * self.scale + self.shift

    def train(
        self, images: Tensor, labels: Tensor, augment: Augment, draws: Draws, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Images and soft labels for training.

        Args:
            images: uint8 (B, C, H, W).
            labels: Class numbers (B,).
            augment: What happens to them.
            draws: Random numbers, `FINISH_DRAWS` rows of them.
            noise: What is put where images are erased, as large as they are; empty if none are.
        """
        finished = self.normalise(images)
        if augment.erasing > 0:
            finished = random_erase(finished, noise, draws, p=augment.erasing)
        targets = soft_labels(labels, self.classes, augment.smoothing)
        if augment.mix_probability > 0 and (augment.mixup > 0 or augment.cutmix > 0):
            options = {"mixup": augment.mixup, "cutmix": augment.cutmix, "p": augment.mix_probability}
            finished, targets = mix(finished, targets, draws, **options)
        return finished, targets


def draw_noise(augment: Augment, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Noise for erasing images of this shape."""
    return torch.randn(shape if augment.erasing > 0 else 0, generator=generator, device=generator.device)
