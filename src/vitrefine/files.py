"""Paths as users write them, and files written so that no full disk or kill leaves half a one, or harms an old one."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from vitrefine.errors import UserError


def user_path(text: str) -> Path:
    """A path in which ~ is the user's folder; where there is no such user, which pathlib would raise for, as it is."""
    return Path(os.path.expanduser(text))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its place, wait for the disk, and rename it."""
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # a disk that nothing can be written to has nothing to be cleared away either
            beside.unlink()
