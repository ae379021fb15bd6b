"""The images that a model is tested on, as bare pixels: all of a set's test part, or some of it."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitrefine.data.dataset import Batch, DataSet, Place
from vitrefine.data.folder import FolderSource, stat_of
from vitrefine.data.options import DataOptions
from vitrefine.data.order import generator_of
from vitrefine.data.shards import ShardSet
from vitrefine.errors import UserError
from vitrefine.evaluate.subject import Size

_READ_FOR_ONE = 4  # images are read for each that is taken, so that chance and not the order of a set decides


@dataclass(frozen=True)
class Shown:
    """Images to be shown to a model."""

    pixels: Tensor
    """(B, C, H, W) from 0 to 1."""
    targets: Tensor
    index: Tensor
    """Number (B,) of each in the test part; what is random about an image is drawn from it."""

    def __len__(self) -> int:
        return len(self.index)

    def part(self, chosen: Tensor) -> "Shown":
        return Shown(self.pixels[chosen], self.targets[chosen], self.index[chosen])


@dataclass(frozen=True)
class ImageSet:
    """The test part of a data set.

    Args:
        data: The set.
        device: Where images go.
        limit: Take at most so many, drawn at random; of a large set only a stretch or every n-th image is looked at.
        seed: Of that draw.
        batch: How many images come at once.
        workers: Processes that read images.
    """

    data: DataSet
    device: torch.device
    limit: int | None = None
    seed: int = 0
    batch: int = 64
    workers: int = 4

    def __post_init__(self) -> None:
        if self.data.test_images == 0:
            raise UserError(f"{self.data.name} has no test images; give a set that has a test part")
        for name, value, least in (("limit", self.limit, 1), ("batch", self.batch, 1), ("workers", self.workers, 0)):
            if value is not None and value < least:
                raise UserError(f"--{name} is {value}; at least {least} is needed")

    def __len__(self) -> int:
        return self.data.test_images if self.limit is None else min(self.limit, self.data.test_images)

    @cached_property
    def key(self) -> str:
        """What decides which images come, and what is in them."""
        some = "" if len(self) == self.data.test_images else f" limit {self.limit} seed {self.seed}"
        return f"{self.data.fingerprint}{some}{_state_of_files(self.data)}"

    def batches(self, size: Size, crop_ratio: float, start: int = 0) -> Iterator[tuple[int, Shown]]:
        """From batch `start` on: the number of the batch that is next, and the images, of which there may be none."""
        options = DataOptions(workers=self.workers, test_batch=self.batch, crop_ratio=crop_ratio)
        place = Place(self.batch, 0, self._stride, self.device, self.seed)
        last = int(self._chosen.nonzero().max())
        # A batch of which nothing can be read does not come, so numbers may be too small: whoever goes on from one sees
        # some images again, and misses none.
        for number, batch in enumerate(self.data.test_loader(place, options, size).epoch(0, start), start):
            shown = self._bare(batch)
            if len(self) < self.data.test_images:
                # By its own number: places in a batch shift where an image is broken.
                chosen = self._chosen[batch.index.cpu() // self._apart]
                shown = shown.part(chosen.nonzero()[:, 0].to(self.device, non_blocking=True))
            yield number + 1, shown
            if (number + 1) * self.batch > last and not self._streamed:
                return

    @property
    def dealt(self) -> str:
        """What decides which images come in which batch: of shards, each process reads a stretch of its own."""
        return f"{self.batch}x{self.workers}" if self._streamed else str(self.batch)

    @property
    def _streamed(self) -> bool:
        return isinstance(self.data, ShardSet)

    @property
    def _apart(self) -> int:
        """How far apart the numbers of the images are that are read: of shards, the first ones are read, one by one."""
        return 1 if self._streamed else self._stride

    @cached_property
    def _stride(self) -> int:
        """One image in so many is read: a prime, for the order of a set may have a rhythm."""
        spare = self.data.test_images // (_READ_FOR_ONE * len(self))
        return max((n for n in range(2, spare + 1) if all(n % d for d in range(2, math.isqrt(n) + 1))), default=1)

    @cached_property
    def _chosen(self) -> Tensor:
        """Which of the images that are read are taken."""
        available = self.data.test_images if self._stride == 1 else self.data.test_images // self._stride
        taken = torch.randperm(available, generator=generator_of(self.seed, available))[: len(self)]
        chosen = torch.zeros(available + self.batch, dtype=torch.bool)
        chosen[taken] = True
        return chosen

    @cached_property
    def _normalisation(self) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(x, device=self.device).view(1, -1, 1, 1) for x in (self.data.mean, self.data.std))
        return mean, std

    def _bare(self, batch: Batch) -> Shown:
        """The bytes that were normalised, from 0 to 1, and exactly so."""
        mean, std = self._normalisation
        levels = ((batch.images * std + mean) * 255).round().clamp(0, 255)
        return Shown(levels / 255, batch.targets, batch.index)


def _state_of_files(data: DataSet) -> str:
    """Size and time of every file of test images: the fingerprint of a set does not tell one edited in place."""
    source = getattr(data, "test_source", None)
    if isinstance(data, ShardSet):
        files: Iterable[str] = data.test_shards
    elif isinstance(source, FolderSource):
        files = map(source.name_of, range(data.test_images))
    else:
        return ""
    found = map(stat_of, files)
    states = [(stat.st_size, stat.st_mtime_ns) if stat else None for stat in found]
    return hashlib.sha256(repr(states).encode()).hexdigest()
