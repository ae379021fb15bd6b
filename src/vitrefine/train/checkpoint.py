"""Checkpoints that survive a kill, a full disk and a damaged file.

One file each, `step-00000120-<digest>.pt`. It is written under another name, flushed to the disk and renamed, so a file
that has its name is whole; the digest (SHA-256) in the name tells whether it still is when it is read. The files before
it are deleted only then, except for the last few, to which a reader falls back.

They hold tensors and plain values, and are read with `weights_only`: no code that a file may carry is run.
"""

import hashlib
import itertools
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

import torch

from vitrefine.errors import UserError

_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")
_PART = ".part"  # the end of a name under which a file is being written


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: Where they are; made when the first one is written.
        keep: How many are kept.
        say: Told in one sentence when a file is damaged.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        self.folder, self.keep, self.say = folder, keep, say

    def files(self) -> list[Path]:
        """The newest first; not looked into."""
        found = [path for path in self.folder.glob("step-*.pt") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: (step_of(path), path.stat().st_mtime), reverse=True)

    def write(self, step: int, state: dict[str, Any]) -> Path:
        """Add a checkpoint and drop the oldest; if that fails, all that were there still are."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tidy()
        beside = self.folder / f".{uuid4().hex[:8]}{_PART}"
        try:
            with beside.open("wb") as file:
                sink = _Sink(file)
                _save(state, sink)
                file.flush()
                os.fsync(file.fileno())
            path = self.folder / f"step-{step:08d}-{sink.digest()}.pt"
            os.replace(beside, path)
            _sync_folder(self.folder)
        except OSError as error:
            raise UserError(self._failure(step, error)) from error
        finally:
            beside.unlink(missing_ok=True)
        for old in [other for other in self.files() if other != path][self.keep - 1 :]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is whole, and what it holds; None if there is none.

        One that is damaged is renamed, so that it takes no place among those that are kept.
        """
        files = self.files()
        for path, before in itertools.zip_longest(files, files[1:]):
            reason = damage(path)
            if reason is None:
                try:
                    return path, load(path)
                except (pickle.UnpicklingError, RuntimeError) as error:
                    reason = f"is no checkpoint ({str(error).partition('.')[0]})"
            path.rename(path.with_suffix(".damaged"))
            instead = f"going back to {before.name}" if before else "starting from the beginning"
            self.say(f"{path} {reason}; {instead}")
        return None

    def tidy(self) -> None:
        """Remove what a killed run was writing."""
        for path in self.folder.glob(f".*{_PART}"):
            path.unlink(missing_ok=True)

    def _failure(self, step: int, error: OSError) -> str:
        files = self.files()
        rescue = (
            f"{files[0]} is whole, so make room and continue with --resume" if files else "make room and start again"
        )
        return f"the checkpoint of step {step} cannot be written ({error.strerror or error}); {rescue}"


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise UserError(f"{path} is no checkpoint of a run")
    return int(name[1])


def load(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def damage(path: Path) -> str | None:
    """What is wrong with a file, or None if it is as it was written."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    name = _NAME.fullmatch(path.name)
    return None if name and name[2] == digest else "is damaged"


class _Sink:
    """A file that knows the digest of what it was given, which need not be what the disk gives back later."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash = file, hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, content: bytes) -> int:
        self.hash.update(content)
        try:
            return self.file.write(content)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()

    def digest(self) -> str:
        return self.hash.hexdigest()[:16]


def _save(state: dict[str, Any], sink: _Sink) -> None:
    try:
        torch.save(state, cast(BinaryIO, sink))
    except RuntimeError as error:
        # When a write fails PyTorch complains that its archive is not where it should be, which tells nobody why.
        if sink.failure is not None:
            raise sink.failure from error
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut; on systems where a folder cannot be opened it is as safe as it gets."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
