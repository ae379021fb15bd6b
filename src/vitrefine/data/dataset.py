"""What a data set gives to training and testing, wherever its images come from.

The order of training images is a permutation P of all of them, drawn from (seed, epoch). With G = batch × world, step
s takes P[s·G … (s+1)·G), and each rank its slice of that; what does not fill a step is left out. One process and many
therefore see the same images in the same steps when G is the same. In testing, rank r sees images r, r + world, ….
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vitrefine.data.options import Augment, DataOptions


@dataclass(frozen=True)
class Place:
    """Where a loader works: its share of each step, and what its randomness starts from."""

    batch: int  # of this process
    rank: int
    world: int
    device: torch.device
    seed: int


@dataclass(frozen=True)
class Batch:
    """Images on the device and what they show."""

    images: Tensor
    """float32 (B, C, H, W), normalised."""
    targets: Tensor
    """Soft labels (B, classes) in training; class numbers (B,) in testing."""
    index: Tensor
    """Number (B,) of each image in its set: of the training images, or of those tested."""

    def __len__(self) -> int:
        return len(self.index)


class Loader(Protocol):
    """Batches of one process."""

    @property
    def skipped(self) -> Counter[str]:
        """Broken images and shards so far, by reason."""

    def __len__(self) -> int:
        """Batches an epoch."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Batches of an epoch from batch `start` on: a pure function of these two, the place and the options."""


class DataSet(Protocol):
    """Images for training and testing."""

    @property
    def name(self) -> str:
        """The text that it was opened from."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of its images, if all are alike."""

    @property
    def channels(self) -> int: ...

    mean: tuple[float, ...]
    """Of its channels, what images are normalised with; may be set to what a model is used to."""

    std: tuple[float, ...]

    @property
    def fingerprint(self) -> str:
        """Short hash of what it consists of."""

    @property
    def train_images(self) -> int: ...

    @property
    def test_images(self) -> int: ...

    def train_loader(self, place: Place, augment: Augment, options: DataOptions, size: tuple[int, int]) -> Loader: ...

    def test_loader(self, place: Place, options: DataOptions, size: tuple[int, int]) -> Loader: ...


def is_utf8(name: str) -> bool:
    """Whether the name of a set or class can be written into files; disks may hold others."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)
