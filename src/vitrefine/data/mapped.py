"""Sets whose images are read one by one, by number: worker processes decode and augment, the device does the rest.

What an image becomes depends on (seed, epoch, step, rank, place in the batch) and on nothing else, so neither the
number of workers nor the batch at which an epoch is taken up again changes it.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.utils.data import Dataset

from vitrefine.data.broken import Broken, BrokenCount
from vitrefine.data.dataset import Batch, Loader, Place
from vitrefine.data.finish import Finish
from vitrefine.data.options import Augment, DataOptions, check_size
from vitrefine.data.order import held_out, order_of_testing, order_of_training, seed_of, steps_per_epoch
from vitrefine.data.picture import BrokenImage
from vitrefine.data.pillow import Transform, chance_from, testing_transform, training_transform
from vitrefine.data.workers import Desk, WorkerBatch
from vitrefine.errors import UserError


class ImageSource(Protocol):
    """Images by number."""

    labels: Tensor
    """Class numbers (N,)."""

    def read(self, number: int) -> Image.Image:
        """The picture; raises `BrokenImage`."""

    def name_of(self, number: int) -> str:
        """What to call it in messages."""


class MappedSet:
    """A data set of two sources."""

    size: tuple[int, int] | None = None
    channels = 3
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD

    def __init__(
        self, name: str, classes: tuple[str, ...], train: ImageSource, test: ImageSource, fingerprint: str
    ) -> None:
        self.name, self.classes, self.fingerprint = name, classes, fingerprint
        self.train_source, self.test_source = train, test
        self.train_images, self.test_images = len(train.labels), len(test.labels)

    def train_loader(self, place: Place, augment: Augment, options: DataOptions, size: tuple[int, int]) -> Loader:
        if self.train_images == 0:
            raise UserError(f"{self.name} has no images to train on; add them, or train on another set")
        kept = (~held_out(self.train_source.labels, options.validation)).nonzero()[:, 0]
        transform = training_transform(augment, check_size(size), self.mean)
        desk = self._desk(place, options, len(kept))
        return _TrainLoader(_Samples(self.train_source, kept, transform, desk.broken.limit), desk, augment)

    def test_loader(self, place: Place, options: DataOptions, size: tuple[int, int]) -> Loader:
        source, tested = self.test_source, torch.arange(self.test_images)
        if options.validation > 0:
            source = self.train_source
            tested = held_out(self.train_source.labels, options.validation).nonzero()[:, 0]
        transform = testing_transform(check_size(size), options.crop_ratio)
        desk = self._desk(place, options, len(tested))
        return _TestLoader(_Samples(source, tested, transform), desk, options.test_batch)

    def _desk(self, place: Place, options: DataOptions, images: int) -> Desk:
        workers = min(options.workers, os.cpu_count() or 1)
        finish = Finish.of(len(self.classes), self.mean, self.std, place.device)
        return Desk(place, workers, finish, BrokenCount(self.name, images, options.max_broken))


class _Request(NamedTuple):
    number: int  # among those chosen
    seed: tuple[int, ...] | None  # None in testing, where nothing is random


class _Requests:
    """Requests of a batch at a time, made when they are needed."""

    def __init__(self, batches: Iterable[int], of: Callable[[int], list[_Request]]) -> None:
        self._batches, self._of = batches, of

    def __iter__(self) -> Iterator[list[_Request]]:
        return map(self._of, self._batches)


class _Sample(NamedTuple):
    image: Tensor | None  # None: broken, and so is everything that might have taken its place
    label: int
    number: int  # in the source when training, among those tested when testing
    broken: list[Broken]


class _Samples(Dataset):
    """Samples by request: decoded, transformed, and with a next one in place of a broken one."""

    def __init__(self, source: ImageSource, chosen: Tensor, transform: Transform, replacements: int = 0) -> None:
        self._source, self._chosen, self._transform = source, chosen, transform
        self._tries = min(1 + replacements, len(chosen))  # more broken ones end the run anyway

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, request: _Request) -> _Sample:
        broken: list[Broken] = []
        for distance in range(self._tries):
            number = (request.number + distance) % len(self)
            image = int(self._chosen[number])
            try:
                picture = self._source.read(image)
            except BrokenImage as reason:
                broken.append(Broken(self._source.name_of(image), str(reason)))
                continue
            with chance_from(seed_of(*(request.seed or ()))):
                shown = number if request.seed is None else image
                return _Sample(self._transform(picture), int(self._source.labels[image]), shown, broken)
        return _Sample(None, 0, request.number, broken)


def _collate(samples: list[_Sample]) -> WorkerBatch:
    good = [(s.image, s.label, s.number) for s in samples if s.image is not None]
    images, labels, numbers = zip(*good, strict=True) if good else ((), (), ())
    return WorkerBatch.of(list(images), labels, numbers, [broken for s in samples for broken in s.broken])


class _TrainLoader:
    def __init__(self, samples: _Samples, desk: Desk, augment: Augment) -> None:
        self._samples, self._desk, self._augment = samples, desk, augment
        self._steps = steps_per_epoch(len(samples), desk.place)

    @property
    def skipped(self) -> Counter[str]:
        return self._desk.skipped

    def __len__(self) -> int:
        return self._steps

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        place = self._desk.place
        order = order_of_training(len(self._samples), number, place, self._augment.repeats)

        def requests(step: int) -> list[_Request]:
            seed = place.seed, number, step, place.rank
            return [_Request(image, (*seed, i)) for i, image in enumerate(order[step].tolist())]

        steps = _Requests(range(start, self._steps), requests)
        return self._desk.train(self._samples, self._augment, number, start, batch_sampler=steps, collate_fn=_collate)


class _TestLoader:
    def __init__(self, samples: _Samples, desk: Desk, batch: int) -> None:
        self._samples, self._desk = samples, desk
        self._batches = order_of_testing(len(samples), desk.place).split(batch)

    @property
    def skipped(self) -> Counter[str]:
        return self._desk.skipped

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        def requests(batch: int) -> list[_Request]:
            return [_Request(image, None) for image in self._batches[batch].tolist()]

        batches = _Requests(range(start, len(self)), requests)
        return self._desk.test(self._samples, batch_sampler=batches, collate_fn=_collate)
