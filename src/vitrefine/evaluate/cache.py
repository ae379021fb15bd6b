"""Predictions on disk: whole ones by content hash, and the parts of one that was interrupted.

KEY.npz                     predictions of one model for one set of images, prepared in one way
KEY.D.parts/FIRST-NEXT.npz  those of batches FIRST to NEXT - 1, D says how images are dealt to batches
"""

import io
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrefine.errors import UserError
from vitrefine.files import replace_file

Columns = dict[str, NDArray]


def default_folder() -> Path:
    """Where predictions are kept: below $VITREFINE_CACHE, or where the system keeps such things."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrefine"
    return Path(os.environ.get("VITREFINE_CACHE") or usual) / "predictions"


@dataclass(frozen=True)
class Cache:
    """A folder of predictions."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made a folder: {error.strerror}; choose one with --cache"
            ) from error
        if not os.access(self.folder, os.W_OK):
            raise UserError(f"{self.folder} cannot be written to; choose a folder with --cache")

    def read(self, key: str) -> Columns | None:
        return _read(self.folder / f"{key}.npz")

    def write(self, key: str, columns: Mapping[str, NDArray]) -> None:
        """Keep the whole, and drop its parts."""
        _write(self.folder / f"{key}.npz", columns)
        for parts in self.folder.glob(f"{key}.*.parts"):
            shutil.rmtree(parts, ignore_errors=True)

    def read_parts(self, key: str, dealt: str) -> tuple[int, list[Columns]]:
        """The batch to go on with, and all that is known of those before."""
        reached, found = 0, []
        names = sorted(path.stem for path in self._parts(key, dealt).glob("*-*.npz"))
        for name in names:
            first, _, following = name.partition("-")
            part = _read(self._parts(key, dealt) / f"{name}.npz") if first.isdigit() and int(first) == reached else None
            if part is not None:
                reached = int(following)
                found.append(part)
        return reached, found

    def write_part(self, key: str, dealt: str, first: int, following: int, columns: Mapping[str, NDArray]) -> None:
        _write(self._parts(key, dealt) / f"{first:08d}-{following:08d}.npz", columns)

    def _parts(self, key: str, dealt: str) -> Path:
        return self.folder / f"{key}.{dealt}.parts"


def _write(path: Path, columns: Mapping[str, NDArray]) -> None:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **columns)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
    except (OSError, UserError) as error:
        raise UserError(f"{error}; make room there, or choose a folder with --cache") from error


def _read(path: Path) -> Columns | None:
    """What a file holds; None if there is none or if it is damaged, for it can be made again."""
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None
