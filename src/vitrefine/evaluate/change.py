"""What is done to images before a model sees them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.subject import Subject


@dataclass(frozen=True)
class Change(ABC):
    """A change of pixels that is the same whenever it is made, and whatever other images are in the batch."""

    @property
    def key(self) -> str:
        """All that decides what it does, as text: its name and its fields."""
        return f"{self}"

    @abstractmethod
    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        """Changed pixels (B, C, H, W), from 0 to 1."""


@dataclass(frozen=True)
class Unchanged(Change):
    """Images as they are."""

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        return shown.pixels
