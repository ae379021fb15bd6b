"""How the axes of a tensor hold a map of tokens, read off its shape."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from vitrefine.surgery.inputs import BATCH

SAME_RATIO = 0.25  # how far the ratio of a map's sides may be from that of an image which is not square: sides round up


@dataclass(frozen=True)
class TokenMap:
    """A map of tokens: `NLC` (batch, tokens, channels), `NHWC` or `NCHW`."""

    layout: str
    height: int
    width: int
    channels: int


def read_maps(shape: tuple[int, ...], image: tuple[int, int] | None) -> list[TokenMap]:
    """The ways in which a shape can be read as a map with the image's ratio of sides; two if it is a cube."""
    ratio = image[0] / image[1] if image else 1.0
    if len(shape) == 3:
        height = max(1, round(math.sqrt(shape[1] * ratio)))
        width = shape[1] // height
        return [TokenMap("NLC", height, width, shape[2])] if height * width == shape[1] else []
    if len(shape) != 4:
        return []
    _, first, second, third = shape
    readings = [TokenMap("NCHW", second, third, first), TokenMap("NHWC", first, second, third)]
    tolerance = 0.0 if ratio == 1 else SAME_RATIO
    return [m for m in readings if m.width and abs(m.height / m.width / ratio - 1) <= tolerance]


def fills_grid(tokens: int, image: Sequence[int]) -> bool:
    """Whether so many tokens are the patches of an image of these sides, and nothing besides."""
    ratio = image[0] / image[1]
    return tokens == round(math.sqrt(tokens * ratio)) * round(math.sqrt(tokens / ratio))


def tokens_first(shape: tuple[int, ...]) -> bool:
    """Whether a shape of the rehearsal is (tokens, batch, channels), the form that `nn.MultiheadAttention` prefers."""
    return len(shape) == 3 and shape[1] == BATCH != shape[0]


def layout_of(shape: tuple[int, ...], image: tuple[int, int] | None, module: nn.Module) -> str:
    """The layout of a tensor of three or four axes that `module` works on.

    Windows and folded patches make maps that have not the image's ratio: there the module's vectors (norms, biases)
    tell how wide a token is.
    """
    if len(shape) == 3:
        return "NLC"
    readings = read_maps(shape, image)
    if len(readings) == 1:
        return readings[0].layout
    widths: Collection[int] = {p.numel() for p in module.parameters() if p.ndim == 1}
    return "NCHW" if shape[1] in widths and shape[-1] not in widths else "NHWC"
