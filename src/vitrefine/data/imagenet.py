"""ImageNet, its other test sets and its better labels.

    ImageNet     train/ and val/, a folder n01440764 … for each class; some may be missing, and train/ for testing
    ReaL         sets of labels for the validation images (Beyer et al., 2020); images without any do not count
    ImageNet-V2  folders 0 … 999, to be read as numbers (Recht et al., 2019)
    ImageNet-A   200 of the classes; predictions are made among these alone (Hendrycks et al., 2021)

The names of the classes, those of ImageNet-A and the ReaL labels come with timm. Class numbers are always those of the
1,000 classes, so that a model trained on all of them can be tested on any of these sets.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from vitrefine.data.folder import TEST_NAMES, FolderSource, class_names, fingerprint, read_folder
from vitrefine.data.mapped import MappedSet
from vitrefine.errors import UserError


@cache
def wnids() -> tuple[str, ...]:
    """Names of the 1,000 classes, in the order of their numbers."""
    return tuple(_timm_file("imagenet_synsets.txt").split())


@cache
def imagenet_a_classes() -> tuple[int, ...]:
    """Numbers of the 200 classes of ImageNet-A."""
    number = {name: i for i, name in enumerate(wnids())}
    return tuple(sorted(number[name] for name in _timm_file("imagenet_a_synsets.txt").split()))


def _timm_file(name: str) -> str:
    return files("timm.data").joinpath("_info", name).read_text("utf-8")


def imagenet_set(name: str, path: Path) -> MappedSet:
    """ImageNet-1k from its folder."""
    val_folder = next((path / part for part in TEST_NAMES if (path / part).is_dir()), None)
    if val_folder is None:
        raise UserError(
            f"there is no folder val in {path}; put the validation images there, in a folder for each class"
        )
    val = _read(val_folder, wnids())
    if not (path / "train").is_dir():
        return _testing_only(name, val)
    train = _read(path / "train", wnids())
    return MappedSet(name, wnids(), train, val, fingerprint(wnids(), train, val))


def imagenet_v2_set(name: str, path: Path) -> MappedSet:
    """One of the versions of ImageNet-V2, for testing."""
    return _testing_only(name, _read(_folder(path, "0 … 999"), tuple(str(i) for i in range(1000))))


def imagenet_a_set(name: str, path: Path) -> MappedSet:
    """ImageNet-A, for testing."""
    source = _read(_folder(path, "n01498041 …"), wnids())
    others = set(source.labels.tolist()) - set(imagenet_a_classes())
    if others:
        raise UserError(f"{path} holds {wnids()[min(others)]}, which is no class of ImageNet-A; write imagenet:{path}")
    return _testing_only(name, source)


def _testing_only(name: str, source: FolderSource) -> MappedSet:
    nothing = FolderSource(source.root, [], torch.empty(0, dtype=torch.long))
    return MappedSet(name, wnids(), nothing, source, fingerprint(wnids(), source))


def _folder(path: Path, what: str) -> Path:
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; give the folder that holds {what}")
    return path


def _read(folder: Path, classes: tuple[str, ...]) -> FolderSource:
    unknown = sorted(set(class_names(folder, least=1)) - set(classes))
    if unknown:
        shown = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        raise UserError(
            f"{folder} holds folders that are no classes ({shown}); they are called {classes[0]} … {classes[-1]}"
        )
    return read_folder(folder, classes)


def real_labels(file_names: Sequence[str], path: Path | None = None) -> list[tuple[int, ...]]:
    """The ReaL labels of validation images, found by the number in each name: ILSVRC2012_val_00000001.JPEG.

    Args:
        file_names: Names or paths of the images.
        path: The authors' real.json, a list of lists; the one that timm carries if None.
    """
    labels = _read_real(path)
    numbers = [re.search(r"ILSVRC2012_val_(\d{8})\.[A-Za-z]+$", name) for name in file_names]
    wrong = next((name for name, number in zip(file_names, numbers, strict=True) if number is None), None)
    if wrong is not None:
        raise UserError(f"{wrong} is no ImageNet validation image; ReaL labels are for ILSVRC2012_val_00000001.JPEG …")
    places = [int(number[1]) - 1 for number in numbers if number is not None]
    beyond = next((name for name, place in zip(file_names, places, strict=True) if not 0 <= place < len(labels)), None)
    if beyond is not None:
        raise UserError(f"there are no ReaL labels for {beyond}: {len(labels)} images have some")
    return [tuple(labels[place]) for place in places]


def _read_real(path: Path | None) -> list[list[int]]:
    try:
        text = _timm_file("imagenet_real_labels.json") if path is None else path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read; give the path of real.json") from error
    try:
        labels = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is no JSON; give the path of real.json") from error
    if not isinstance(labels, list) or not all(isinstance(one, list) for one in labels):
        raise UserError(f"{path} is no list of lists of class numbers; give the path of real.json")
    return labels


def real_hits(predicted: Tensor, labels: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Which predicted classes (N,) are among an image's labels, and which images (N,) have labels and so count."""
    right = [number in allowed for number, allowed in zip(predicted.tolist(), labels, strict=True)]
    return torch.tensor(right, dtype=torch.bool), torch.tensor([len(one) > 0 for one in labels], dtype=torch.bool)


def only_classes(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """Logits (N, 1000) with all but the given classes ruled out."""
    if logits.shape[-1] != len(wnids()):
        raise UserError(f"a model of {logits.shape[-1]} classes cannot be tested on ImageNet's 1000; use one of 1000")
    ruled_out = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    ruled_out[list(classes)] = False
    return logits.masked_fill(ruled_out, float("-inf"))
