"""Images to look at a model with: some of a data set, spread over it, or those of a plain folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.data.dataset import DataSet, Place
from vitrefine.data.folder import is_image
from vitrefine.data.open import open_data
from vitrefine.data.options import DataOptions
from vitrefine.data.picture import BrokenImage, read_picture
from vitrefine.data.pillow import testing_transform
from vitrefine.errors import UserError
from vitrefine.files import user_path
from vitrefine.surgery.inputs import example_inputs

TOGETHER = 8  # read in one go


@dataclass(frozen=True)
class InputFormat:
    """What a model takes: the size and channels of images, and how they are scaled; None where it does not say."""

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    crop_ratio: float | None

    @classmethod
    def of(cls, model: nn.Module) -> "InputFormat":
        """As a model says of itself."""
        inner = unwrap_model(model)
        inputs = example_inputs(inner)
        if any(value.ndim != 4 for value in inputs.values()):
            raise UserError(
                f"{type(inner).__name__} takes {' and '.join(inputs)}; give a model that takes an image alone"
            )
        ((_, channels, height, width),) = (value.shape for value in inputs.values())
        known: dict[str, Any] = getattr(inner, "pretrained_cfg", None) or {}
        mean, std = (tuple(known[key]) if len(known.get(key) or ()) == channels else None for key in ("mean", "std"))
        return cls((height, width), channels, mean, std, known.get("crop_pct"))


@dataclass(frozen=True)
class Sample:
    """Images from 0 to 1, (N, C, H, W), and how the set that they are of is scaled."""

    pictures: Tensor
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def for_model(self, given: InputFormat) -> Tensor:
        """As a model takes them: its channels, and its scaling, or the set's where the model has none of its own."""
        pictures = with_channels(self.pictures, given.channels)
        mean, std = given.mean or self.mean, given.std or self.std
        if mean is None or std is None or len(mean) != given.channels:
            return pictures
        scale = [torch.tensor(values, dtype=pictures.dtype).view(-1, 1, 1) for values in (mean, std)]
        return (pictures - scale[0]) / scale[1]


def with_channels(pictures: Tensor, channels: int) -> Tensor:
    """Grey for colour, or colour for grey: (N, C, H, W)."""
    if pictures.shape[1] == channels:
        return pictures
    return pictures.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)


def sample_images(data: str, count: int, given: InputFormat) -> Sample:
    """Some images of a data set, at the size that a model takes.

    Args:
        data: As for `vitrefine train`, or a folder of images without class folders.
        count: How many; all if there are fewer.
        given: What the model takes.
    """
    path = user_path(data.removeprefix("folder:"))
    files = _flat(path) if path.is_dir() else []
    if files:
        return _of_files(files, count, given)
    return _of_set(open_data(data), count, given)


def _flat(folder: Path) -> list[Path]:
    """The images in a folder that holds no other folders, but hidden ones."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in entries):
        return []
    return [Path(entry.path) for entry in entries if is_image(entry.name)]


def _of_files(files: list[Path], count: int, given: InputFormat) -> Sample:
    transform = testing_transform(given.size, given.crop_ratio)
    pictures: list[Tensor] = []
    for place in _spread(len(files), count):
        try:
            pictures.append(transform(read_picture(files[place])))
        except BrokenImage as error:
            raise UserError(f"{files[place]} cannot be read ({error}); take it out of the folder") from error
    return Sample(torch.stack(pictures).float() / 255)


def _of_set(data: DataSet, count: int, given: InputFormat) -> Sample:
    if not data.test_images:
        raise UserError(f"{data.name} has no images for testing to look at; give another data set")
    place = Place(batch=TOGETHER, rank=0, world=1, device=torch.device("cpu"), seed=0)
    together = min(TOGETHER, count)
    options = DataOptions(test_batch=together, workers=0, crop_ratio=given.crop_ratio if data.size is None else None)
    loader = data.test_loader(place, options, given.size)
    # In the place of a batch of which nothing can be read the next one comes, or none if it was the last.
    first = (next(iter(loader.epoch(0, start)), None) for start in _spread(len(loader), -(-count // together)))
    found = {int(batch.index[0]): batch.images for batch in first if batch is not None}
    if not found:
        raise UserError(f"none of the test images of {data.name} can be read; mend them")
    # Neighbours are of one class, and features of few classes at a time would be taken to be more alike than they are.
    mixed = [part[place] for place in range(together) for part in found.values() if place < len(part)]
    images = torch.stack(mixed[:count])
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return Sample((images * std + mean).clamp(0, 1), data.mean, data.std)


def _spread(there: int, wanted: int) -> list[int]:
    """So many numbers below `there`, evenly apart: sets are sorted by class."""
    wanted = min(there, wanted)
    return [number * there // wanted for number in range(wanted)]
