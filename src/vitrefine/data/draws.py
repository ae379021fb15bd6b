"""The random numbers of a batch, drawn at once and dealt out: one launch on the device, and nothing random below.

Augmentation is thereby a plain function of images and numbers, which a compiler can fuse and a test can steer.
"""

import torch
from torch import Tensor


class Draws:
    """Uniform numbers in [0, 1), a column for each image, handed out row by row."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._taken = 0

    @classmethod
    def of(cls, rows: int, images: int, generator: torch.Generator) -> "Draws":
        """Draw `rows` numbers for each image, on the generator's device."""
        return cls(torch.rand(rows, images, generator=generator, device=generator.device))

    def take(self, rows: int) -> Tensor:
        """The next rows (rows, B)."""
        self._taken += rows
        if self._taken > len(self._rows):
            raise IndexError(f"{len(self._rows)} rows were drawn, and {self._taken} are needed")
        return self._rows[self._taken - rows : self._taken]

    def one(self) -> Tensor:
        """The next row (B,)."""
        return self.take(1)[0]


def normal(uniform: Tensor) -> Tensor:
    """Normally distributed numbers out of uniform ones."""
    return torch.erfinv(2 * uniform - 1) * 2**0.5
