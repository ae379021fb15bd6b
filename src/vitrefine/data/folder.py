"""Folders of images: a folder for each class, in train/ and val/ (or test/), or alone.

Class folders alone are divided once and for all: a fifth of the images of each class is for testing.
"""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrefine.data.dataset import is_utf8
from vitrefine.data.mapped import MappedSet
from vitrefine.data.order import kept_for_testing
from vitrefine.data.picture import read_picture
from vitrefine.errors import UserError

EXTENSIONS = (".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TEST_NAMES = ("val", "valid", "validation", "test")
_SIZES_LOOKED_AT = 1000


class FolderSource:
    """Image files by number."""

    def __init__(self, root: Path, paths: list[str], labels: Tensor) -> None:
        self.root, self.labels = root, labels
        # One array of bytes: a list of strings would be copied, page by page, into every worker process.
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def read(self, number: int) -> Image.Image:
        return read_picture(self.name_of(number))

    def name_of(self, number: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._paths[number]))

    def file_names(self) -> list[str]:
        """Paths of all images, below the root."""
        return [os.fsdecode(path) for path in self._paths]

    def part(self, chosen: Tensor) -> "FolderSource":
        """Some of the images."""
        part = FolderSource(self.root, [], self.labels[chosen])
        part._paths = self._paths[chosen.numpy()]
        return part


def folder_set(name: str, path: Path) -> MappedSet:
    """Open a folder of images."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; give one that holds a folder of images for each class")
    train_folder = path / "train"
    if not train_folder.is_dir():
        return _divided(name, path)
    test_folder = next((path / name for name in TEST_NAMES if (path / name).is_dir()), None)
    if test_folder is None:
        raise UserError(
            f"{path} holds train but none of {', '.join(TEST_NAMES)}; add one, or give {train_folder} to test on a "
            "fifth of it, or rename it if it is a class"
        )
    classes = class_names(train_folder)
    train = _filled(train_folder, classes)
    unknown = sorted(set(class_names(test_folder, least=1)) - set(classes))
    if unknown:
        shown = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        raise UserError(f"{test_folder} holds classes that {train_folder} does not ({shown}); name them alike")
    test = read_folder(test_folder, classes)
    return MappedSet(name, classes, train, test, fingerprint(classes, train, test))


def _divided(name: str, path: Path) -> MappedSet:
    parts = (entry for entry in sorted(path.iterdir()) if entry.name.lower() in TEST_NAMES)
    part = next(filter(_is_part, parts), None)
    if part is not None:
        raise UserError(f"{path} holds {part.name} but no train; call the folder of the training images train")
    classes = class_names(path)
    every = _filled(path, classes)
    for_testing = kept_for_testing(every.labels, name)
    train, test = every.part(~for_testing), every.part(for_testing)
    return MappedSet(name, classes, train, test, fingerprint(classes, train, test))


def class_names(folder: Path, least: int = 2) -> tuple[str, ...]:
    """Names of the class folders."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names and any(is_image(entry.name) for entry in os.scandir(folder)):
        raise UserError(f"the images in {folder} are in no class folders; put those of each class into one of its name")
    if not names:
        raise UserError(f"{folder} is empty; give a folder that holds a folder of images for each class")
    if len(names) < least:
        raise UserError(f"{folder} holds one class only ({names[0]}); at least two are needed to tell apart")
    unwritable = next((name for name in names if not is_utf8(name)), None)
    if unwritable is not None:
        raise UserError(f"the name of the class folder {unwritable!r} in {folder} is no UTF-8; rename it")
    return tuple(names)


def read_folder(folder: Path, classes: tuple[str, ...]) -> FolderSource:
    """All images below the folders of these classes, in the order of their names."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(_images_below(folder / name)) if (folder / name).is_dir() else []
        paths += [f"{name}/{path}" for path in found]
        labels += [label] * len(found)
    if not paths:
        raise UserError(f"{folder} holds no images; files that end in {', '.join(EXTENSIONS)} are looked for")
    return FolderSource(folder, paths, torch.tensor(labels))


def _filled(folder: Path, classes: tuple[str, ...]) -> FolderSource:
    """All images of classes that must have some."""
    source = read_folder(folder, classes)
    filled = set(source.labels.tolist())
    empty = next((name for label, name in enumerate(classes) if label not in filled), None)
    if empty is not None:
        raise UserError(f"{folder / empty} holds no images; add some, or remove it")
    return source


def _is_part(folder: Path) -> bool:
    """Whether a folder looks like one of class folders rather than of images."""
    entries = list(os.scandir(folder)) if folder.is_dir() else []
    return any(entry.is_dir() for entry in entries) and not any(is_image(entry.name) for entry in entries)


def _images_below(folder: Path) -> list[str]:
    found = []
    been = set(folder.resolve().parents)  # where no link may lead, or folders would have no end
    for here, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        place = Path(here).resolve()
        if place in been:
            folders.clear()
            continue
        been.add(place)
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(here, folder)
        found += [name if below == "." else f"{below}/{name}" for name in files if is_image(name)]
    return found


def _raise(error: OSError) -> None:
    raise error


def is_image(name: str) -> bool:
    """Whether a file is an image by its name; hidden ones are not."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def stat_of(path: str) -> os.stat_result | None:
    """What the disk knows of a file; None for a link to nowhere, which whoever reads it will tell."""
    try:
        return os.stat(path)
    except OSError:
        return None


def fingerprint(classes: tuple[str, ...], *sources: FolderSource) -> str:
    """Hash of the names of all images, and of the sizes of a thousand of them: a million would take too long."""
    digest = hashlib.sha256(repr(classes).encode())
    for source in sources:
        names = source.file_names()
        digest.update("\n".join(names).encode("utf-8", "surrogateescape"))
        digest.update(source.labels.numpy().tobytes())
        every = max(1, len(names) // _SIZES_LOOKED_AT)
        found = [stat_of(source.name_of(i)) for i in range(0, len(names), every)]
        digest.update(repr([stat.st_size if stat else 0 for stat in found]).encode())
    return digest.hexdigest()[:16]
