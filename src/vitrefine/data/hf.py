"""Hugging Face data sets, from the hub or from a folder written by save_to_disk.

The image column is the one of that kind (or called image or img), the label column the one of class labels (or called
label, labels, fine_label or cls). The test part is validation or test; without one, a fifth is kept for it.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrefine.data.folder import TEST_NAMES
from vitrefine.data.mapped import MappedSet
from vitrefine.data.order import kept_for_testing
from vitrefine.data.picture import BrokenImage, read_picture
from vitrefine.errors import UserError
from vitrefine.files import user_path

_IMAGE_NAMES = ("image", "img", "picture", "pixel_values")
_LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class")


class HubSource:
    """Images of a table's column, by number."""

    def __init__(self, name: str, table: Any, image_column: str, labels: Tensor) -> None:
        self.labels = labels
        self._name, self._table, self._image_column = name, table, image_column

    def read(self, number: int) -> Image.Image:
        value = self._table[number][self._image_column]
        if isinstance(value, Mapping):  # an image that is not decoded: bytes, or the path of a file
            value = value.get("bytes") or value.get("path")
        if value is None:
            raise BrokenImage("missing")
        return read_picture(value)

    def name_of(self, number: int) -> str:
        return f"image {number} of {self._name}"


def hub_set(name: str, text: str) -> MappedSet:
    """Open a data set by its name on the hub, name:configuration, or by its folder."""
    parts = _load(text)
    if "train" not in parts:
        raise UserError(f"{text} has no part called train (it has {', '.join(sorted(parts))}); choose another data set")
    table = parts["train"]
    image_column = _column(text, table, "image", _IMAGE_NAMES, "Image")
    label_column = _column(text, table, "label", _LABEL_NAMES, "ClassLabel")
    labels, classes = _labels(text, table, label_column)
    test_part = next((part for part in TEST_NAMES if part in parts and len(parts[part]) > 0), None)
    digest = hashlib.sha256(repr((classes, image_column, label_column)).encode())
    digest.update(str(table._fingerprint).encode() + labels.numpy().tobytes())
    train = HubSource(f"{text} train", _undecoded(table, image_column), image_column, labels)
    if test_part is None:
        chosen = kept_for_testing(labels, name)
        return MappedSet(name, classes, _part(train, ~chosen), _part(train, chosen), digest.hexdigest()[:16])
    tested = parts[test_part]
    missing = {image_column, label_column} - set(tested.column_names)
    if missing:
        raise UserError(f"the part {test_part} of {text} has no column {', '.join(sorted(missing))}, as train has")
    test_labels, _ = _labels(text, tested, label_column, classes)
    digest.update(str(tested._fingerprint).encode() + test_labels.numpy().tobytes())
    test = HubSource(f"{text} {test_part}", _undecoded(tested, image_column), image_column, test_labels)
    return MappedSet(name, classes, train, test, digest.hexdigest()[:16])


def _load(text: str) -> Mapping[str, Any]:
    import datasets

    path = user_path(text)
    try:
        if path.exists():
            loaded = datasets.load_from_disk(os.fspath(path))
        else:
            name, _, configuration = text.partition(":")
            loaded = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # whatever its many back ends raise: all of it means that there is no such data
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{text} cannot be opened as a Hugging Face data set ({first}); check its name or folder"
        ) from error
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _column(text: str, table: Any, what: str, names: tuple[str, ...], kind: str) -> str:
    by_kind = [column for column, feature in table.features.items() if type(feature).__name__ == kind]
    by_name = [column for column in names if column in table.column_names]
    found = [column for column in by_name if column in by_kind] or by_kind or by_name
    if not found:
        shown = ", ".join(table.column_names)
        raise UserError(f"{text} has no column that is the {what} (it has {shown}); call it {what!r}")
    return found[0]


def _labels(
    text: str, table: Any, column: str, classes: tuple[str, ...] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Class numbers of all rows, and the names of the classes."""
    values = table[column]
    values = values if isinstance(values, list) else list(values)
    if not values:
        raise UserError(f"{text} is empty; choose another data set")
    names = getattr(table.features[column], "names", None)
    if names is not None:
        named = tuple(map(str, names))
        numbers = [-1 if value is None else int(value) for value in values]
    else:
        shown = {str(value) for value in values if value is not None}
        named = classes or tuple(sorted(shown, key=lambda value: (not value.isdecimal(), len(value), value)))
        place = {value: number for number, value in enumerate(named)}
        numbers = [-1 if value is None else place.get(str(value), -1) for value in values]
    if classes is not None and named != classes:
        raise UserError(f"the classes of training and testing differ in {text}; name them alike")
    if min(numbers) < 0:
        row = next(i for i, number in enumerate(numbers) if number < 0)
        raise UserError(f"row {row} of {text} has no label that is known ({values[row]!r}); choose another data set")
    if len(named) < 2:
        raise UserError(f"{text} holds one class only ({named[0]}); at least two are needed to tell apart")
    return torch.tensor(numbers, dtype=torch.long), named


def _undecoded(table: Any, column: str) -> Any:
    """The table with its images as they are stored, so that a broken one can be told from the others."""
    import datasets

    if isinstance(table.features[column], datasets.Image):
        return table.cast_column(column, datasets.Image(decode=False))
    return table


def _part(source: HubSource, chosen: Tensor) -> HubSource:
    table = source._table.select(chosen.nonzero()[:, 0].tolist())
    return HubSource(source._name, table, source._image_column, source.labels[chosen])
