"""WebDataset shards: tar files of images (key.jpg) and labels (key.cls), on a disk or behind a URL.

Shards are dealt to ranks and workers by `sharding`; images are decoded and augmented in the workers, as for folders.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import IterableDataset, get_worker_info

from vitrefine.data.broken import Broken, BrokenCount
from vitrefine.data.dataset import Batch, Loader, Place
from vitrefine.data.finish import Finish
from vitrefine.data.options import Augment, DataOptions, check_size
from vitrefine.data.order import TEST_SHARE, seed_of
from vitrefine.data.pillow import Transform, chance_from, testing_transform, training_transform
from vitrefine.data.shard_list import Shards, class_number, classes_beside, expand, look_into
from vitrefine.data.shard_reader import Decoded, ShardReader, buffered_order
from vitrefine.data.sharding import (
    Stretch,
    pieces_of,
    shard_order,
    stretch_of_testing,
    stretch_of_training,
    worker_stretch,
)
from vitrefine.data.workers import Desk, WorkerBatch
from vitrefine.errors import UserError

_BUFFER = 2000  # samples, still encoded, among which a worker picks at random


def shard_set(name: str, text: str) -> "ShardSet":
    """Open TRAIN or TRAIN::TEST; with training shards alone, a fifth of them is for testing."""
    train_pattern, double_colon, test_pattern = text.partition("::")
    if not train_pattern or (double_colon and not test_pattern):
        raise UserError(f"{name!r} names no shards; write wds:TRAIN.tar or wds:TRAIN.tar::TEST.tar")
    train, classes = look_into(expand(train_pattern))
    if len(classes) < 2:
        raise UserError(f"{name} holds one class only; at least two are needed to tell apart")
    if test_pattern:
        test, tested = look_into(expand(test_pattern))
        numbers = {known: number for number, known in enumerate(classes)}
        unknown = next((label for label in reversed(tested) if class_number(label, numbers) is None), None)
        if unknown is not None:
            raise UserError(f"{test_pattern} holds a class that {train_pattern} does not ({unknown}); label them alike")
        if classes_beside(test.urls[0]) not in ((), classes):
            raise UserError(f"{test_pattern} numbers classes otherwise than {train_pattern}; make classes.txt alike")
    else:
        train, test = _divided(train, TEST_SHARE)
    return ShardSet(name, classes, train, test)


def _divided(shards: Shards, share: float) -> tuple[Shards, Shards]:
    """Keep a share of the shards, evenly spread, and at least one."""
    count = max(1, round(share * len(shards.urls)))
    if count >= len(shards.urls):
        raise UserError(
            f"{len(shards.urls)} shards cannot be divided so that a share of {share:g} is for testing; add shards, or "
            "give test shards with wds:TRAIN::TEST"
        )
    kept = {(2 * i + 1) * len(shards.urls) // (2 * count) for i in range(count)}
    return shards.part([i for i in range(len(shards.urls)) if i not in kept]), shards.part(sorted(kept))


class ShardSet:
    """A data set of WebDataset shards."""

    size: tuple[int, int] | None = None
    channels = 3
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD

    def __init__(self, name: str, classes: tuple[str, ...], train: Shards, test: Shards) -> None:
        self.name, self.classes = name, classes
        self._train, self._test = train, test
        self.train_images, self.test_images = sum(train.sizes), sum(test.sizes)
        described = repr((classes, train.urls, train.sizes, test.urls, test.sizes))
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def test_shards(self) -> tuple[str, ...]:
        """Paths or URLs."""
        return self._test.urls

    def train_loader(self, place: Place, augment: Augment, options: DataOptions, size: tuple[int, int]) -> Loader:
        if augment.repeats > 1:
            raise UserError(
                f"{self.name} is read as a stream, in which images cannot be repeated; set augment.repeats=1"
            )
        shards = _divided(self._train, options.validation)[0] if options.validation > 0 else self._train
        transform = training_transform(augment, check_size(size), self.mean)
        return _TrainLoader(
            _Source(shards, self.classes, place, transform), self._desk(shards, place, options), augment
        )

    def test_loader(self, place: Place, options: DataOptions, size: tuple[int, int]) -> Loader:
        shards = _divided(self._train, options.validation)[1] if options.validation > 0 else self._test
        transform = testing_transform(check_size(size), options.crop_ratio)
        source = _Source(shards, self.classes, place, transform)
        return _TestLoader(source, self._desk(shards, place, options), options.test_batch)

    def _desk(self, shards: Shards, place: Place, options: DataOptions) -> Desk:
        finish = Finish.of(len(self.classes), self.mean, self.std, place.device)
        lost = sum(one.images for one in shards.broken)
        broken = BrokenCount(self.name, sum(shards.sizes) + lost, options.max_broken)
        broken.add(shards.broken)
        return Desk(place, options.workers, finish, broken)


@dataclass(frozen=True)
class _Source:
    """What goes to the worker processes: nothing that is on a device."""

    shards: Shards
    classes: tuple[str, ...]
    place: Place
    transform: Transform


@dataclass(frozen=True)
class _Stream(IterableDataset):
    """The batches of one worker in one epoch."""

    source: _Source
    stretch: Stretch
    batch: int
    epoch: int | None  # None in testing
    start: int

    def __iter__(self) -> Iterator[WorkerBatch]:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        # PyTorch asks its worker 0 first, so that one makes batch `start`.
        worker = (self.start + (0 if info is None else info.id)) % workers
        part = worker_stretch(self.stretch, self.batch, worker, workers)
        steps = range(worker, -(-len(self.stretch) // self.batch), workers)
        done = len(range(worker, self.start, workers))
        place, shards = self.source.place, self.source.shards

        count = len(shards.urls)
        order = list(range(count)) if self.epoch is None else shard_order(count, place.seed, self.epoch)
        reader = ShardReader(shards, self.source.classes, pieces_of(part, shards.sizes, order))
        positions = list(range(len(part)))
        if self.epoch is not None:
            seed = seed_of(place.seed, self.epoch, place.rank, worker)
            positions = list(buffered_order(len(part), _BUFFER, seed))
        decoded = reader.read(positions[done * self.batch :])
        samples = decoded if self.epoch is None else _replaced(decoded)
        for step in steps[done:]:
            group = list(islice(samples, self.batch))
            broken, reader.broken = reader.broken, []
            yield self._collated(step, group, broken)

    def _collated(self, step: int, group: list[Decoded | None], broken: list[Broken]) -> WorkerBatch:
        images, good = [], [sample for sample in group if sample is not None]
        for position, sample in enumerate(good):
            place = self.source.place
            with chance_from(seed_of(place.seed, self.epoch or 0, step, place.rank, position)):
                images.append(self.source.transform(sample.picture))
        labels, numbers = [sample.label for sample in good], [sample.number for sample in good]
        return WorkerBatch.of(images, labels, numbers, broken)


def _replaced(samples: Iterator[Decoded | None]) -> Iterator[Decoded]:
    """Put the next good sample in the place of each broken one; at the end, the last good one."""
    waiting, last = 0, None
    for sample in samples:
        if sample is None:
            waiting += 1
            continue
        last = sample
        for _ in range(waiting + 1):
            yield sample
        waiting = 0
    if last is not None:
        for _ in range(waiting):
            yield last


class _TrainLoader:
    def __init__(self, source: _Source, desk: Desk, augment: Augment) -> None:
        self._source, self._desk, self._augment = source, desk, augment
        self._stretch = stretch_of_training(sum(source.shards.sizes), desk.place)

    @property
    def skipped(self) -> Counter[str]:
        return self._desk.skipped

    def __len__(self) -> int:
        return len(self._stretch) // self._desk.place.batch

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        batch = self._desk.place.batch
        stream = _Stream(self._source, self._stretch, batch, number, start)
        for finished in self._desk.train(stream, self._augment, number, start, batch_size=None):
            if len(finished) < batch:
                raise UserError("a worker's part of the shards holds no image that can be read; mend or remove them")
            yield finished


class _TestLoader:
    def __init__(self, source: _Source, desk: Desk, batch: int) -> None:
        self._source, self._desk, self._batch = source, desk, batch
        self._stretch = stretch_of_testing(sum(source.shards.sizes), desk.place)

    @property
    def skipped(self) -> Counter[str]:
        return self._desk.skipped

    def __len__(self) -> int:
        return -(-len(self._stretch) // self._batch)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        stream = _Stream(self._source, self._stretch, self._batch, None, start)
        return self._desk.test(stream, batch_size=None)
