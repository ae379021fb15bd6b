"""Two runs never write into one folder: a lock that dies with its process.

The system holds it (`fcntl.lockf`), for this process and none of its children, and lets go of it when the process ends,
however it ends. So a lock that can be taken is free: what a killed run left behind is in nobody's way. On file systems
of clusters this needs POSIX locks, which NFS, GPFS and Lustre (mounted with `flock`) have.
"""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from vitrefine.errors import UserError

# A process does not lock itself out, so it has to remember; and to close a file lets go of all its locks on it.
_held: set[Path] = set()


class FolderLock:
    """Held from `take` (or `with`) to `release`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = (folder / "lock").resolve()
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take it, or say who has it."""
        if self.path in _held:
            raise UserError(f"{self.folder} is being written by this very process; choose another folder")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if isinstance(error, BlockingIOError | PermissionError):
                raise UserError(
                    f"{self.folder} is being written by {holder}; wait for it or choose another folder"
                ) from error
            raise UserError(
                f"{self.path} cannot be locked ({error.strerror}); choose a folder on a local disk"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        self._descriptor = descriptor
        _held.add(self.path)

    def release(self) -> None:
        """Let go of it; the file stays, for to delete it would take it from under one who is about to lock it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self.path)

    def __enter__(self) -> "FolderLock":
        self.take()
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()


def is_locked(folder: Path) -> bool:
    """Whether a living process writes into a folder."""
    path = (folder / "lock").resolve()
    if path in _held:
        return True
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False  # no lock, or none that we may touch: then the folder is not ours to write either
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int) -> None:
    for wait in (0.05, 0.1, 0.2, None):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if wait is None:
                raise
            time.sleep(wait)  # `is_locked` of another process may be holding it for a moment


def _holder(descriptor: int) -> str:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {content['pid']} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
