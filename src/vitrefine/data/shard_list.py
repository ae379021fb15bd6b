"""Finding WebDataset shards and what they hold, before anything is read from them.

Beside the shards, two files say what they hold: `sizes.json`, {"train-0000.tar": 1000, …}, and `classes.txt`, a name a
line in the order of the class numbers. Where they are missing, shards on a disk are looked through; shards behind a URL
are not, since that would fetch them all.
"""

import glob
import json
import lzma
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vitrefine.data.broken import Broken
from vitrefine.data.folder import EXTENSIONS
from vitrefine.errors import UserError

READ_ERRORS = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError, ValueError)
DAMAGED = "damaged shard"
_THREADS = 8
_MOST_CLASSES = 1_000_000  # a greater label is a date or an article's number, and would make a model of its size


@dataclass(frozen=True)
class Shards:
    """Shards and the number of images that can be read of each."""

    urls: tuple[str, ...]
    sizes: tuple[int, ...]
    broken: tuple[Broken, ...] = ()

    def part(self, chosen: list[int]) -> "Shards":
        """Some of the shards."""
        urls = tuple(self.urls[i] for i in chosen)
        broken = tuple(one for one in self.broken if one.name in urls)
        return Shards(urls, tuple(self.sizes[i] for i in chosen), broken)


@dataclass
class _Content:
    """What looking through a shard brings to light."""

    images: int = 0
    labels: set[str] = field(default_factory=set)
    damaged: bool = False


def expand(pattern: str) -> tuple[str, ...]:
    """The shards that a pattern means: braces as {0000..0099} or {a,b}, and * in local paths."""
    import braceexpand

    try:
        expanded = list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"the braces of {pattern!r} do not match; write them as in train-{{0000..0099}}.tar") from error
    paths = [os.path.expanduser(path) for path in expanded]
    found = [path for one in paths for path in (sorted(glob.glob(one)) if "*" in one else [one])]
    missing = [path for path in found if _is_local(path) and not os.path.isfile(path)]
    if not found or len(missing) == len(found):
        raise UserError(f"there is no shard {missing[0] if missing else pattern}; correct the path or the pattern")
    if missing:
        raise UserError(
            f"{len(missing)} of {len(found)} shards are missing, first {missing[0]}; correct the pattern {pattern}"
        )
    return tuple(found)


def look_into(urls: tuple[str, ...]) -> tuple[Shards, tuple[str, ...]]:
    """Count the images of shards and find the names of their classes."""
    tables = {folder: _table(folder, "sizes.json") for folder in {os.path.dirname(url) for url in urls}}
    sizes = [tables[os.path.dirname(url)].get(os.path.basename(url)) for url in urls]
    classes = classes_beside(urls[0])
    known = tuple(size for size in sizes if size is not None)
    if len(known) == len(urls) and classes:
        return Shards(urls, known), classes
    remote = next((url for url in urls if not _is_local(url)), None)
    if remote is not None:
        raise UserError(
            f"what {remote} holds is not known; put sizes.json (images of each shard) and classes.txt (a name a line) "
            "beside it"
        )
    with ThreadPoolExecutor(_THREADS) as pool:
        contents = list(pool.map(_look_through, urls))
    if not any(content.images for content in contents):
        if all(content.damaged for content in contents):
            raise UserError(f"{urls[0]} and the shards like it are no tar files, or damaged; make or fetch them again")
        raise UserError(f"{urls[0]} and the shards like it hold no images; put key.jpg beside key.cls in them")
    labels = set().union(*(content.labels for content in contents))
    if not classes and not labels:
        raise UserError(f"the images in {urls[0]} and the shards like it have no labels; put key.cls beside key.jpg")
    return _counted(urls, contents), classes or _class_names(labels)


def _counted(urls: tuple[str, ...], contents: list[_Content]) -> Shards:
    whole = [content.images for content in contents if not content.damaged]
    usual = max(whole, default=0)
    broken = tuple(
        Broken(url, DAMAGED, max(1, usual - content.images))
        for url, content in zip(urls, contents, strict=True)
        if content.damaged
    )
    return Shards(urls, tuple(content.images for content in contents), broken)


def _class_names(labels: set[str]) -> tuple[str, ...]:
    """Classes as labels name them; numbers are those of classes, of which some may be missing."""
    if all(label.isdecimal() for label in labels):
        greatest = max(map(int, labels))
        if greatest >= _MOST_CLASSES:
            raise UserError(f"the label {greatest} is no class number; number classes from 0 on, or label by names")
        return tuple(str(i) for i in range(greatest + 1))
    return tuple(sorted(labels))


def class_number(label: str, numbers: Mapping[str, int]) -> int | None:
    """The class that a label means, by its name or else by its number; None if there is none such."""
    if label in numbers:
        return numbers[label]
    return int(label) if label.isdecimal() and int(label) < len(numbers) else None


def _look_through(path: str) -> _Content:
    content = _Content()
    try:
        with tarfile.open(path) as archive:
            for sample in samples_of((name, archive.extractfile(member)) for name, member in _files(archive)):
                label = label_text({suffix: file.read() for suffix, file in sample.files.items() if suffix in LABELS})
                content.images += 1
                content.labels |= {label} if label is not None else set()
    except PermissionError:
        raise  # nothing is wrong with the shard
    except READ_ERRORS:
        content.damaged = True
    return content


def _files(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for member in archive:
        if member.isfile():
            yield member.name, member


@dataclass(frozen=True)
class TarSample:
    """Files of one key."""

    key: str
    files: dict[str, Any]

    @property
    def image(self) -> Any:
        """The file that is an image, or None."""
        return next((file for suffix, file in self.files.items() if _is_image(suffix)), None)


LABELS = ("cls", "json")


def samples_of(files: Iterator[tuple[str, Any]]) -> Iterator[TarSample]:
    """Group files that follow one another and share a key; groups without an image are passed over."""
    from webdataset.tariterators import base_plus_ext

    sample: TarSample | None = None
    for name, file in files:
        key, suffix = base_plus_ext(name)
        if key is None:
            continue
        if sample is None or key != sample.key:
            if sample is not None and sample.image is not None:
                yield sample
            sample = TarSample(key, {})
        sample.files[suffix.lower()] = file
    if sample is not None and sample.image is not None:
        yield sample


def _is_image(suffix: str) -> bool:
    return "." + suffix.rpartition(".")[2] in EXTENSIONS


def label_text(files: dict[str, bytes]) -> str | None:
    """The label of a sample as it is written: in key.cls, or under "label" or "cls" in key.json."""
    try:
        if "cls" in files:
            return files["cls"].decode().strip() or None
        described = json.loads(files["json"]) if "json" in files else {}
    except ValueError:  # no text, or no JSON
        return None
    label = described.get("label", described.get("cls")) if isinstance(described, dict) else None
    return None if label is None else str(label)


def _is_local(url: str) -> bool:
    return ":" not in url.split("/", 1)[0]


def _table(folder: str, name: str) -> dict[str, int]:
    text = _text(folder, name)
    try:
        said = {} if text is None else json.loads(text)
        table = {str(shard): int(count) for shard, count in said.items()}
        if min(table.values(), default=0) < 0:
            raise ValueError("no shard holds fewer images than none")
        return table
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f'{folder}/{name} must say how many images each shard holds: {{"a.tar": 1000, …}}') from error


def classes_beside(url: str) -> tuple[str, ...]:
    """What the classes.txt beside a shard says; nothing if there is none."""
    folder, name = os.path.dirname(url), "classes.txt"
    names = [line.strip() for line in (_text(folder, name) or "").splitlines() if line.strip()]
    twice = next((one for one, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise UserError(f"{folder}/{name} names two classes {twice}; give each a name of its own")
    return tuple(names)


def _text(folder: str, name: str) -> str | None:
    """A small file beside the shards, or None if there is none."""
    import webdataset

    path = os.path.join(folder, name)
    if _is_local(path) and not os.path.isfile(path):
        return None
    try:
        with webdataset.gopen(path) as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8; write it anew as such") from error
    except READ_ERRORS:
        if _is_local(path):
            raise
        return None
