"""Sets that fit in memory: handwritten digits (the default, nothing to download) and CIFAR in the forms it comes in.

    digits                 scikit-learn's 1,797 handwritten digits, enlarged to 32×32
    cifar10:PATH           a folder or archive of the official Python batches, an .npz, or zips of image mosaics
    cifar100:PATH

Files are read without running code that they may carry: the official batches are pickles, so only the types that
they consist of are let in.
"""

import io
import lzma
import pickle
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrefine.data.picture import read_picture
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
        # By how often each level occurs: floats of all pixels would take a gigabyte.
        channels = self.train.images.unbind(dim=1)
        share = torch.stack([channel.flatten().bincount(minlength=256) for channel in channels]).double()
        share /= share.sum(dim=1, keepdim=True)
        level = torch.arange(256, dtype=torch.float64) / 255
        mean = share @ level
        variance = (share * (level - mean[:, None]) ** 2).sum(dim=1)
        # A channel of one value has no spread to divide by.
        return mean.tolist(), variance.sqrt().clamp(min=1 / 255).tolist()


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


_CLASSES = {"cifar10": 10, "cifar100": 100}


def cifar(kind: str, path: Path) -> ArraySet:
    """CIFAR-10 or CIFAR-100 (`kind` is cifar10 or cifar100) from any of its forms."""
    if not path.exists():
        raise UserError(f"there is no {path}; give the folder or file that holds {kind}")
    splits, names = _read_npz(kind, path) if path.suffix == ".npz" else _read_mosaics(path)
    if not splits and path.suffix != ".zip":  # beside batches there may lie zips of something else
        splits, names = _read_batches(kind, path)
    missing = {"train", "test"} - splits.keys()
    if missing:
        what = f"no {' and no '.join(sorted(missing))} images of {kind}"
        raise UserError(f"{path} holds {what}; give the official batches, their archive, an .npz or zips of mosaics")
    train, test = (_split(path, *splits[part]) for part in ("train", "test"))
    if train.images.shape[1:] != test.images.shape[1:]:
        raise UserError(f"the images for training and testing in {path} differ in size; make them alike")
    trained, tested = (set(split.labels.tolist()) for split in (train, test))
    if len(trained) < 2 or tested - trained:
        raise UserError(f"{path} must hold two classes or more for training, and for testing none besides these")
    count, most = max(trained) + 1, _CLASSES[kind]
    if count > most:
        raise UserError(f"{path} has labels up to {count - 1}, but {kind}'s end at {most - 1}; give {kind} itself")
    return ArraySet(kind, train, test, names if len(names) >= count else tuple(map(str, range(count))))


def _split(path: Path, images: np.ndarray, labels: np.ndarray) -> Split:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise UserError(f"the images in {path} are {images.dtype} {images.shape}; uint8 (N, 32, 32, 3) is expected")
    if labels.dtype.kind not in "iu" or len(labels) != len(images) or labels.min() < 0:
        raise UserError(f"the labels in {path} are {labels.dtype} {labels.shape}; class numbers from 0 on are expected")
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).contiguous()
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))


Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def _read_npz(kind: str, path: Path) -> tuple[Arrays, tuple[str, ...]]:
    """Keys x_train, y_train, x_test, y_test, as Keras names them; images (N, 32, 32, 3)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {s: (file[f"x_{s}"], file[f"y_{s}"].reshape(-1)) for s in ("train", "test")}, ()
    except Exception as error:  # what is damaged may make anything be raised
        raise UserError(f"{path} is no {kind}: x_train, y_train, x_test and y_test are expected in it") from error


def _mosaics(path: Path) -> list[Path]:
    return sorted(path.glob("*.zip")) if path.is_dir() else [path] if path.suffix == ".zip" else []


def _read_mosaics(path: Path) -> tuple[Arrays, tuple[str, ...]]:
    """Zips of pictures named split_class_part, in each of which 32×32 images of one class are stacked."""
    parts: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for archive in _mosaics(path):
        try:
            with zipfile.ZipFile(archive) as file:
                for name in file.namelist():
                    match = re.fullmatch(r"(train|test)_(\d+)_(\d+)\.\w+", name)
                    if match is None:
                        continue
                    images = np.asarray(read_picture(file.read(name))).reshape(-1, 32, 32, 3)
                    kept = parts.setdefault(match[1], ([], []))
                    kept[0].append(images)
                    kept[1].append(np.full(len(images), int(match[2]), dtype=np.int64))
        except Exception as error:  # what is damaged may make anything be raised
            raise UserError(f"{archive} is damaged ({error}); get it again") from error
    listing = path / "classes.txt" if path.is_dir() else path.with_name("classes.txt")
    names = tuple(listing.read_text("utf-8").split()) if listing.is_file() else ()
    return {split: (np.concatenate(x), np.concatenate(y)) for split, (x, y) in parts.items()}, names


class _OnlyArrays(pickle.Unpickler):
    """Lets in what the official batches are made of: plain containers, and numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        array = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if array or (module, name) == ("_codecs", "encode"):  # the latter is how old protocols write bytes
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a batch of images")


_BATCH = re.compile(r"train|test|data_batch_\d|test_batch|(batches\.)?meta")


def _batch_files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if _BATCH.fullmatch(file.name) and file.is_file():
                yield file.name, file.read_bytes()
        return
    try:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda m: m.name):
                name = Path(member.name).name
                file_object = archive.extractfile(member) if _BATCH.fullmatch(name) and member.isfile() else None
                if file_object is not None:
                    yield name, file_object.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} is no archive of CIFAR batches, or it is damaged; download it again") from error


def _read_batches(kind: str, path: Path) -> tuple[Arrays, tuple[str, ...]]:
    """The official Python version: data_batch_1 … and test_batch, or train and test, and a meta file."""
    label_key, name_key = ("labels", "label_names") if kind == "cifar10" else ("fine_labels", "fine_label_names")
    parts: dict[str, tuple[list[np.ndarray], list[int]]] = {}
    names: tuple[str, ...] = ()
    for name, content in _batch_files(path):
        split = "test" if name in ("test", "test_batch") else "train"
        try:
            batch = _OnlyArrays(io.BytesIO(content), encoding="latin1").load()
            if name_key in batch:
                names = tuple(batch[name_key])
                continue
            images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = batch[label_key]
        except Exception as error:  # what is damaged may make anything be raised
            raise UserError(
                f"{name} in {path} is no batch of {kind}, or it is damaged ({error}); download it again"
            ) from error
        kept = parts.setdefault(split, ([], []))
        kept[0].append(images)
        kept[1].extend(labels)
    return {split: (np.concatenate(x), np.array(y, dtype=np.int64)) for split, (x, y) in parts.items()}, names
