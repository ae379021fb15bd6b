"""What is done to images before a model sees them."""

from typing import Protocol

from torch import Tensor

from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.subject import Subject


class Change(Protocol):
    """A change of pixels that is the same whenever it is made, and whatever other images are in the batch."""

    @property
    def key(self) -> str:
        """All that decides what it does, as text."""

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        """Changed pixels (B, C, H, W), from 0 to 1."""


class Unchanged:
    """Images as they are."""

    key = "unchanged"

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        return shown.pixels
