"""What a model predicts for a set's test images, computed once.

Kept of each image are the five best classes, how sure the model is of the first, and the cross-entropy: 50,000 images
take 4 MB instead of 200 MB of logits, so that every repeat of a noise and every crop of a sweep can be kept.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrefine import __version__
from vitrefine.data.imagenet import only_classes
from vitrefine.errors import UserError
from vitrefine.evaluate.cache import Cache, Columns
from vitrefine.evaluate.change import Change, Unchanged
from vitrefine.evaluate.images import ImageSet, Shown
from vitrefine.evaluate.subject import Subject, check_ratio

Watcher = Callable[[str, int, int], None]
"""Told what is being done, how many images are through, and how many there are."""

Scores = tuple[Tensor, ...]
"""Of a batch, the columns of `Predictions`."""

BEST = 5
_KEEP_EVERY = 20.0  # seconds


def silent(what: str, done: int, of: int) -> None:
    """Watch nothing."""


@dataclass(frozen=True)
class Predictions:
    """Of each image, in the order of their numbers."""

    index: NDArray[np.int64]
    target: NDArray[np.int64]
    best: NDArray[np.int64]
    """The five best classes (N, 5), or fewer where there are fewer."""
    confidence: NDArray[np.float64]
    """The probability of the best class."""
    loss: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        return self.best[:, 0] == self.target

    @cached_property
    def among_best(self) -> NDArray[np.bool_]:
        return (self.best == self.target[:, None]).any(axis=1)


@dataclass(frozen=True)
class Examiner:
    """Predictions of one model for one set of images.

    Args:
        subject: The model.
        images: On the subject's device.
        classes: Those among which it may choose; all if None.
        cache: Where predictions are kept; nowhere if None.
        watch: Told how far it is.
    """

    subject: Subject
    images: ImageSet
    classes: Sequence[int] | None = None
    cache: Cache | None = None
    watch: Watcher = silent

    def predict(
        self, change: Change | None = None, *, crop_ratio: float | None = None, what: str = "predictions"
    ) -> Predictions:
        """Predictions, from the cache where they are there; what was interrupted is taken up again.

        Args:
            change: Made to the pixels first; nothing if None.
            crop_ratio: At test time; the subject's own if None.
            what: For who watches.
        """
        change = change or Unchanged()
        ratio = self.subject.crop_ratio if crop_ratio is None else check_ratio(crop_ratio)
        key = self._key(change, ratio)
        kept = self.cache.read(key) if self.cache else None
        if kept is not None and kept.keys() == {field.name for field in fields(Predictions)}:
            return Predictions(**kept)
        columns = self._computed(key, change, ratio, what)
        if self.cache:
            self.cache.write(key, columns)
        return Predictions(**columns)

    def predict_again(self, first: Predictions, change: Change | None = None, **options: Any) -> Predictions:
        """`predict`, for comparison: of the same images as the first predictions, and no others."""
        found = self.predict(change, **options)
        if not np.array_equal(found.index, first.index):
            raise UserError(
                f"some images of {self.images.data.name} could be read one time and not another; mend them, and "
                "evaluate again with a new --cache"
            )
        return found

    def _key(self, change: Change, ratio: float) -> str:
        subject = self.subject
        prepared = (subject.size, subject.mean, subject.std, ratio, change.key, self.classes)
        computed = (subject.precision, subject.device.type, __version__)
        return hashlib.sha256(repr((subject.key, self.images.key, prepared, computed)).encode()).hexdigest()[:40]

    def _computed(self, key: str, change: Change, ratio: float, what: str) -> Columns:
        dealt, total = self.images.dealt, len(self.images)
        start, parts = self.cache.read_parts(key, dealt) if self.cache else (0, [])
        done, first, fresh = sum(len(part["index"]) for part in parts), start, list[Scores]()
        kept_at = time.monotonic()
        self.watch(what, done, total)

        def keep() -> None:
            if fresh:
                parts.append(self._fetched(fresh))
                if self.cache:
                    self.cache.write_part(key, dealt, first, reached, parts[-1])

        reached = start
        try:
            for following, shown in self.images.batches(self.subject.size, ratio, start):
                if len(shown):
                    fresh.append(self._scored(shown, change))
                    done += len(shown)
                    self.watch(what, done, total)
                reached = following
                if time.monotonic() - kept_at > _KEEP_EVERY:
                    keep()
                    fresh, first, kept_at = [], reached, time.monotonic()
        except KeyboardInterrupt:
            keep()
            raise
        if fresh:
            parts.append(self._fetched(fresh))
        if not parts:
            raise UserError(f"none of the test images of {self.images.data.name} can be read; mend them")
        return _in_order(_joined(parts))

    def _scored(self, shown: Shown, change: Change) -> Scores:
        pixels = change(self.subject, shown)
        with torch.no_grad():
            logits = self.subject.logits(pixels)
        data = self.images.data
        if logits.shape[-1] != len(data.classes):
            raise UserError(
                f"{self.subject.name} tells {logits.shape[-1]} classes apart, but {data.name} has {len(data.classes)}; "
                "test it on the classes that it was trained on"
            )
        if self.classes is not None:
            logits = only_classes(logits, self.classes)
        return score(logits, shown.targets, shown.index)

    def _fetched(self, scores: Sequence[Scores]) -> Columns:
        columns = fetched(scores)
        broken = ~np.isfinite(columns["loss"])
        if broken.any():
            raise UserError(
                f"{self.subject.name} gives logits that are no numbers for test image {columns['index'][broken][0]}; "
                "train it anew"
            )
        return columns


def score(logits: Tensor, targets: Tensor, index: Tensor) -> Scores:
    """What is kept of logits (B, classes), still on their device: to fetch it for each batch would make it wait."""
    logits = logits.double()
    probability, best = logits.softmax(dim=1).topk(min(BEST, logits.shape[1]))
    return index, targets, best, probability[:, 0], F.cross_entropy(logits, targets, reduction="none")


def fetched(scores: Sequence[Scores]) -> Columns:
    """The columns of `Predictions`, of several batches."""
    columns = (torch.cat(column).cpu().numpy() for column in zip(*scores, strict=True))
    return dict(zip((field.name for field in fields(Predictions)), columns, strict=True))


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _in_order(columns: Columns) -> Columns:
    """By number, each image once: after an interruption beside a batch of broken images, some are seen again."""
    _, place = np.unique(columns["index"], return_index=True)
    return {name: column[place] for name, column in columns.items()}
