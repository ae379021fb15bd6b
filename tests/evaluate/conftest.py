"""A small set of images and a small model to test on it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrefine.data.arrays import ArraySet, Split
from vitrefine.data.dataset import Batch, DataSet, Loader, Place
from vitrefine.data.memory import MemorySet
from vitrefine.data.options import Augment, DataOptions
from vitrefine.evaluate.images import ImageSet
from vitrefine.evaluate.predictions import Examiner
from vitrefine.evaluate.subject import subject_of


class Linear(nn.Module):
    """Logits that are linear in the pixels."""

    num_classes = 10

    def __init__(self, size: int = 8, classes: int = 10) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(classes, 3 * size * size, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight.T


def small_set(images: int = 60, size: int = 8, classes: int = 10) -> MemorySet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, classes, (images,), generator=generator)
    split = Split(pixels, labels)
    return MemorySet("small", ArraySet("small", split, split, tuple(map(str, range(classes)))))


class Interrupted:
    """A set whose reader presses Ctrl-C after some batches, as often as it is told to."""

    def __init__(self, data: DataSet, after: int, times: int = 1) -> None:
        self._data, self._after, self.left = data, after, times
        self.read: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_loader(self, place: Place, augment: Augment, options: DataOptions, size: tuple[int, int]) -> Loader:
        raise NotImplementedError

    def test_loader(self, place: Place, options: DataOptions, size: tuple[int, int]) -> Loader:
        outer, inner = self, self._data.test_loader(place, options, size)

        class Reader:
            @property
            def skipped(self) -> Counter[str]:
                return inner.skipped

            def __len__(self) -> int:
                return len(inner)

            def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
                for count, batch in enumerate(inner.epoch(number, start)):
                    if outer.left and count == outer._after:
                        outer.left -= 1
                        raise KeyboardInterrupt
                    outer.read += batch.index.tolist()
                    yield batch

        return Reader()


@pytest.fixture
def data() -> MemorySet:
    return small_set()


@pytest.fixture
def examiner(data: MemorySet) -> Callable[..., Examiner]:
    """`examiner(limit=10, cache=…)`: a linear model on the small set."""

    def make(model: nn.Module | None = None, over: Any = None, **options: Any) -> Examiner:
        kept = {name: options.pop(name) for name in ("cache", "classes", "watch") if name in options}
        subject = subject_of(model or Linear(), over or data, device="cpu", size=options.pop("size", None))
        images = ImageSet(over or data, subject.device, **{"batch": 16, "workers": 0, **options})
        return Examiner(subject, images, **kept)

    return make
