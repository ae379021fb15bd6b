"""Batches out of worker processes: how they are asked for, handed over, counted and finished on the device."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrefine.data.broken import Broken, BrokenCount
from vitrefine.data.dataset import Batch, Place
from vitrefine.data.draws import Draws
from vitrefine.data.finish import FINISH_DRAWS, Finish, draw_noise
from vitrefine.data.options import Augment
from vitrefine.data.order import generator_of


class WorkerBatch(NamedTuple):
    """What a worker hands over."""

    images: Tensor
    """uint8 (B, C, H, W)."""
    labels: Tensor
    numbers: Tensor
    broken: list[Broken]
    """What it met on the way."""

    @classmethod
    def of(
        cls, images: list[Tensor], labels: Sequence[int], numbers: Sequence[int], broken: list[Broken]
    ) -> "WorkerBatch":
        stacked = torch.stack(images) if images else torch.empty(0, 3, 1, 1, dtype=torch.uint8)
        return cls(stacked, torch.tensor(labels, dtype=torch.long), torch.tensor(numbers, dtype=torch.long), broken)


@dataclass(frozen=True)
class Desk:
    """Where batches of worker processes arrive."""

    place: Place
    workers: int
    finish: Finish
    broken: BrokenCount

    @property
    def skipped(self) -> Counter[str]:
        return self.broken.skipped

    def train(self, data: Dataset, augment: Augment, epoch: int, start: int, **order: Any) -> Iterator[Batch]:
        """Finished batches for training; `order` says what PyTorch's loader asks the data set for."""
        place = self.place
        for step, read in enumerate(self._read(data, order), start):
            generator = generator_of(place.seed, epoch, step, place.rank, device=place.device)
            draws = Draws.of(FINISH_DRAWS, len(read.labels), generator)
            noise = draw_noise(augment, tuple(read.images.shape), generator)
            yield Batch(*self.finish.train(read.images, read.labels, augment, draws, noise), read.numbers)

    def test(self, data: Dataset, **order: Any) -> Iterator[Batch]:
        """Finished batches for testing; one of which nothing could be read is left out."""
        for read in self._read(data, order):
            if len(read.labels) > 0:
                yield Batch(self.finish.normalise(read.images), read.labels, read.numbers)

    def _read(self, data: Dataset, order: dict[str, Any]) -> Iterator[WorkerBatch]:
        with warnings.catch_warnings():
            # More workers than cores are slower, and still what a stream's order was made for.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            batches: Iterator[WorkerBatch] = iter(
                DataLoader(
                    data,
                    num_workers=self.workers,
                    pin_memory=self.place.device.type == "cuda",
                    generator=torch.Generator(),  # else it draws from the process's own, which is the model's
                    worker_init_fn=_keep_quiet,
                    **order,
                )
            )
        for read in batches:
            self.broken.add(read.broken)
            images, labels, numbers = (x.to(self.place.device, non_blocking=True) for x in read[:3])
            yield WorkerBatch(images, labels, numbers, read.broken)


def _keep_quiet(_: int) -> None:
    """Pillow warns of notes in a file that it cannot read, such as a camera's; the picture is there all the same."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
