"""From an image file, whatever its kind, to an upright RGB picture; or the reason why there is none."""

import io
from pathlib import Path
from struct import error as StructError

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError


class BrokenImage(Exception):
    """An image that cannot be read; its text is the reason in a word or two, the same for alike cases."""


def read_picture(source: Path | str | bytes | Image.Image) -> Image.Image:
    """Read an image from a file, from the bytes of one, or from a picture already opened."""
    if isinstance(source, Path | str):
        source = _content(source)
    if source == b"":
        raise BrokenImage("empty")
    try:
        with Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source as picture:
            return _rgb(picture)
    except UnidentifiedImageError as error:
        raise BrokenImage("not an image") from error
    except Image.DecompressionBombError as error:
        raise BrokenImage("too large") from error
    except OSError as error:
        raise BrokenImage("truncated" if "truncated" in str(error).lower() else "damaged") from error
    except (SyntaxError, ValueError, IndexError, TypeError, EOFError, RuntimeError, StructError) as error:
        # Pillow's readers raise these on files whose beginning is right and whose inside is not.
        raise BrokenImage("damaged") from error


def _content(path: Path | str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise BrokenImage("missing") from error
    except OSError as error:
        raise BrokenImage("not readable") from error


def _rgb(picture: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith(("I", "F")):
        upright = _eight_bits(upright)
    elif upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")
    return upright.convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Grey of sixteen bits, or of decimals up to one, which Pillow would clip at 255."""
    values = np.nan_to_num(np.asarray(picture))
    if picture.mode == "F":
        values = values * (255 if values.max(initial=0) <= 1 else 1)
    elif picture.mode.startswith("I;16") or values.max(initial=0) > 255:
        values = values >> 8
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))
