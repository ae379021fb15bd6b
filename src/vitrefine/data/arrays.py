"""Sets that fit in memory: handwritten digits (the default, nothing to download) and CIFAR in the forms it comes in.

    digits                 scikit-learn's 1,797 handwritten digits, enlarged to 32×32
    cifar10:PATH           a folder or archive of the official Python batches, an .npz, or zips of image mosaics
    cifar100:PATH

Files are read without running code that they may carry: the official batches are pickles, so only the types that
they consist of are let in.
"""

import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrefine.errors import UserError


@dataclass(frozen=True)
class Split:
    """Images, uint8 (N, C, H, W), and their labels (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ArraySet:
    """A set of images in memory."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.train.images.shape[-2:]
        return height, width

    def channel_statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel of the training images, in 0..1."""
        pixels = self.train.images.transpose(0, 1).flatten(1).float() / 255
        # A channel of one value has no spread to divide by.
        return pixels.mean(dim=1).tolist(), pixels.std(dim=1).clamp(min=1 / 255).tolist()


def digits(size: int = 32) -> ArraySet:
    """Scikit-learn's digits: 8×8, seventeen levels of grey, every fifth one kept for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images)[:, None] / 16
    images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    images = (images * 255).round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(data.target).long()
    held_out = torch.arange(len(labels)) % 5 == 4
    split = {kept: Split(images[held_out == kept], labels[held_out == kept]) for kept in (False, True)}
    return ArraySet("digits", split[False], split[True], tuple("0123456789"))


def cifar(kind: str, path: Path) -> ArraySet:
    """CIFAR-10 or CIFAR-100 (`kind` is cifar10 or cifar100) from any of its forms."""
    if not path.exists():
        raise UserError(f"there is no {path}; give the folder or file that holds {kind}")
    reader = _read_npz if path.suffix == ".npz" else _read_mosaics if _mosaics(path) else _read_batches
    splits, names = reader(kind, path)
    missing = {"train", "test"} - splits.keys()
    if missing:
        raise UserError(f"{path} holds no {' and no '.join(sorted(missing))} images of {kind}")
    made = {name: _split(path, images, labels) for name, (images, labels) in splits.items()}
    count = int(max(split.labels.max() for split in made.values())) + 1
    classes = names if len(names) == count else tuple(str(i) for i in range(count))
    return ArraySet(kind, made["train"], made["test"], classes)


def _split(path: Path, images: np.ndarray, labels: np.ndarray) -> Split:
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
        raise UserError(f"the images in {path} are {images.dtype} {images.shape}; uint8 (N, 32, 32, 3) is expected")
    return Split(
        torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()
    )


Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def _read_npz(kind: str, path: Path) -> tuple[Arrays, tuple[str, ...]]:
    """Keys x_train, y_train, x_test, y_test, as Keras names them; images (N, 32, 32, 3)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {s: (file[f"x_{s}"], file[f"y_{s}"].reshape(-1)) for s in ("train", "test")}, ()
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no {kind}: x_train, y_train, x_test and y_test are expected in it") from error


def _mosaics(path: Path) -> list[Path]:
    return sorted(path.glob("*.zip")) if path.is_dir() else [path] if path.suffix == ".zip" else []


def _read_mosaics(kind: str, path: Path) -> tuple[Arrays, tuple[str, ...]]:
    """Zips of pictures named split_class_part, in each of which 32×32 images of one class are stacked."""
    from PIL import Image

    parts: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for archive in _mosaics(path):
        try:
            with zipfile.ZipFile(archive) as file:
                for name in file.namelist():
                    match = re.fullmatch(r"(train|test)_(\d+)_(\d+)\.\w+", name)
                    if match is None:
                        continue
                    with Image.open(io.BytesIO(file.read(name))) as picture:
                        images = np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)
                    kept = parts.setdefault(match[1], ([], []))
                    kept[0].append(images)
                    kept[1].append(np.full(len(images), int(match[2]), dtype=np.int64))
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise UserError(f"{archive} is damaged: {error}") from error
    listing = path / "classes.txt" if path.is_dir() else path.with_name("classes.txt")
    names = tuple(listing.read_text().split()) if listing.is_file() else ()
    return {split: (np.concatenate(x), np.concatenate(y)) for split, (x, y) in parts.items()}, names


class _OnlyArrays(pickle.Unpickler):
    """Lets in what the official batches are made of: plain containers, and numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        array = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if array or (module, name) == ("_codecs", "encode"):  # the latter is how old protocols write bytes
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a batch of images")


def _batch_files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield file.name, file.read_bytes()
        return
    try:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda m: m.name):
                file_object = archive.extractfile(member) if member.isfile() else None
                if file_object is not None:
                    yield Path(member.name).name, file_object.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{path} is no archive of CIFAR batches, or it is cut short") from error


def _read_batches(kind: str, path: Path) -> tuple[Arrays, tuple[str, ...]]:
    """The official Python version: data_batch_1 … and test_batch, or train and test, and a meta file."""
    label_key, name_key = ("labels", "label_names") if kind == "cifar10" else ("fine_labels", "fine_label_names")
    parts: dict[str, tuple[list[np.ndarray], list[int]]] = {}
    names: tuple[str, ...] = ()
    for name, content in _batch_files(path):
        split = "test" if name in ("test", "test_batch") else "train"
        if not re.fullmatch(r"train|test|data_batch_\d|test_batch|(batches\.)?meta", name):
            continue
        try:
            batch = _OnlyArrays(io.BytesIO(content), encoding="latin1").load()
            if name_key in batch:
                names = tuple(batch[name_key])
                continue
            images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = batch[label_key]
        except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, ValueError, TypeError) as error:
            raise UserError(f"{name} in {path} is no batch of {kind}, or it is damaged ({error})") from error
        kept = parts.setdefault(split, ([], []))
        kept[0].append(images)
        kept[1].extend(labels)
    return {split: (np.concatenate(x), np.array(y, dtype=np.int64)) for split, (x, y) in parts.items()}, names
