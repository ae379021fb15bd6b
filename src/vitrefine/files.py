"""Writing files so that neither a full disk nor a kill leaves half a one, or harms the one that was there."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from vitrefine.errors import UserError


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
