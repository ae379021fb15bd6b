"""Sets in memory: uint8 images are moved to the device once, and batches are made there, without worker processes."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, cached_property

import torch
from torch import Tensor

from vitrefine.data.arrays import ArraySet, Split
from vitrefine.data.dataset import Batch, Loader, Place
from vitrefine.data.draws import Draws
from vitrefine.data.finish import FINISH_DRAWS, Finish, draw_noise
from vitrefine.data.geometry import (
    RESIZED_CROP_DRAWS,
    centre_crop,
    random_crop,
    random_flip,
    random_resized_crop,
    resize,
)
from vitrefine.data.options import Augment, DataOptions, check_size
from vitrefine.data.order import held_out, order_of_testing, order_of_training, seed_of, steps_per_epoch
from vitrefine.data.randaugment import RAND_AUGMENT_DRAWS, rand_augment

_WORTH_COMPILING = 10_000  # images
_DRAWS = RESIZED_CROP_DRAWS + 1 + RAND_AUGMENT_DRAWS + FINISH_DRAWS


class MemorySet:
    """A data set whose images are all in memory."""

    def __init__(self, name: str, arrays: ArraySet) -> None:
        self.name = name
        self.classes = arrays.classes
        self.size: tuple[int, int] | None = arrays.size
        self.channels = arrays.train.images.shape[1]
        self.train_images, self.test_images = len(arrays.train), len(arrays.test)
        self._arrays = arrays
        self._on_device: dict[tuple[str, torch.device], Split] = {}
        mean, std = arrays.channel_statistics()
        self.mean, self.std = tuple(mean), tuple(std)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.classes).encode())
        for split in (self._arrays.train, self._arrays.test):
            digest.update(split.images.numpy().tobytes())
            digest.update(split.labels.numpy().tobytes())
        return digest.hexdigest()[:16]

    def train_loader(self, place: Place, augment: Augment, options: DataOptions, size: tuple[int, int]) -> Loader:
        chosen = ~held_out(self._arrays.train.labels, options.validation)
        return _TrainLoader(self._split("train", place), chosen, place, augment, check_size(size), self._finish(place))

    def test_loader(self, place: Place, options: DataOptions, size: tuple[int, int]) -> Loader:
        name = "train" if options.validation > 0 else "test"
        split = self._split(name, place)
        chosen = torch.ones(len(split), dtype=torch.bool)
        if options.validation > 0:
            chosen = held_out(self._arrays.train.labels, options.validation)
        ratio = 1.0 if options.crop_ratio is None else options.crop_ratio
        return _TestLoader(split, chosen, place, options.test_batch, check_size(size), ratio, self._finish(place))

    def _split(self, name: str, place: Place) -> Split:
        """The images on the place's device; they stay there for every later loader."""
        key = name, place.device
        if key not in self._on_device:
            split: Split = getattr(self._arrays, name)
            self._on_device[key] = Split(split.images.to(place.device), split.labels.to(place.device))
        return self._on_device[key]

    def _finish(self, place: Place) -> Finish:
        return Finish.of(len(self.classes), self.mean, self.std, place.device)


class _TrainLoader:
    def __init__(
        self, split: Split, chosen: Tensor, place: Place, augment: Augment, size: tuple[int, int], finish: Finish
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self._split, self._place, self._augment, self._size, self._finish = split, place, augment, size, finish
        self._chosen = chosen.nonzero()[:, 0]
        self._steps = steps_per_epoch(len(self._chosen), place)
        self._generator = torch.Generator(place.device)
        mean_colour = (-finish.shift / finish.scale).flatten()
        self._fill = mean_colour.round()
        # Compiling takes half a minute, which a small set does not win back.
        worth_it = place.device.type == "cuda" and len(self._chosen) >= _WORTH_COMPILING
        self._made = _compiled() if worth_it else training_batch

    def __len__(self) -> int:
        return self._steps

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        place, augment, split = self._place, self._augment, self._split
        order = self._chosen[order_of_training(len(self._chosen), number, place, augment.repeats)].to(place.device)
        for step in range(start, self._steps):
            self._generator.manual_seed(seed_of(place.seed, number, step, place.rank))
            rows = torch.rand(_DRAWS, place.batch, generator=self._generator, device=place.device)
            noise = draw_noise(augment, (place.batch, len(self._fill), *self._size), self._generator)
            images, targets = self._made(
                split.images, split.labels, order[step], rows, noise, self._finish, augment, self._size, self._fill
            )
            yield Batch(images, targets, order[step])


def training_batch(
    images: Tensor,
    labels: Tensor,
    index: Tensor,
    rows: Tensor,
    noise: Tensor,
    finish: Finish,
    augment: Augment,
    size: tuple[int, int],
    fill: Tensor,
) -> tuple[Tensor, Tensor]:
    """Images and soft labels of a batch: a plain function of tensors, for the compiler."""
    draws = Draws(rows)
    pixels = augment_pixels(images[index], augment, size, fill, draws)
    return finish.train(pixels, labels[index], augment, draws, noise)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(training_batch, dynamic=False)


def augment_pixels(images: Tensor, augment: Augment, size: tuple[int, int], fill: Tensor, draws: Draws) -> Tensor:
    """Crop, flip, RandAugment and resize uint8 images (B, C, H, W), on their device."""
    if augment.crop == "resized":
        images = random_resized_crop(images, size, draws, augment.scale)
    elif augment.crop == "pad":
        images = random_crop(images, augment.padding, draws)
    if augment.flip > 0:
        images = random_flip(images, draws, augment.flip)
    if augment.rand_augment is not None:
        strength = {"magnitude": augment.rand_augment, "magnitude_std": augment.rand_augment_std}
        images = rand_augment(images, draws, fill=fill, **strength)
    return resize(images, size)


class _TestLoader:
    def __init__(
        self,
        split: Split,
        chosen: Tensor,
        place: Place,
        batch: int,
        size: tuple[int, int],
        ratio: float,
        finish: Finish,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self._split, self._size, self._finish = split, size, finish
        self._resized = (round(size[0] / ratio), round(size[1] / ratio))
        chosen_images = chosen.nonzero()[:, 0]
        number = order_of_testing(len(chosen_images), place)
        self._batches = list(
            zip(number.to(place.device).split(batch), chosen_images[number].to(place.device).split(batch), strict=True)
        )

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        for index, place in self._batches[start:]:
            images = centre_crop(resize(self._split.images[place], self._resized), self._size)
            yield Batch(self._finish.normalise(images), self._split.labels[place], index)
