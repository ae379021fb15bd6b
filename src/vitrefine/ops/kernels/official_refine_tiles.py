"""Pixels of attention maps, a tile at a time: in planes (B, H, Nq, Nk), or in scratch memory with channels innermost.

Expanded maps exist for a band only: some images, or some rows of one image and HALO rows more on either side. Innermost
channels make each of the nine neighbours of a pixel one aligned load, whatever the length of a row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl

from vitrefine.ops.kernels.shapes import cdiv

GROUP = tl.constexpr(16)  # channels of expanded maps that a program has at a time
HALO = 2  # rows: a convolution there, and one back
UNSPECIALISED = ["start", "count", "origin", "buffer_rows", "n_tiles", "n_heads", "n_rows", "n_columns"]
LEAST_ROOM = 64 << 20  # bytes of scratch memory, however small the maps are


class Band(NamedTuple):
    """Images from `image` on, and of each the rows from `row` on."""

    image: int
    images: int
    row: int
    rows: int

    def around(self, halo: int, n_rows: int) -> tuple[int, int]:
        """First row and number of rows with a halo, as far as the image goes."""
        first, last = max(0, self.row - halo), min(n_rows, self.row + self.rows + halo)
        return first, last - first


def bands(batch: int, n_rows: int, row_bytes: int, room: int) -> Iterator[Band]:
    """Bands of about equal size, each of which takes at most `room` bytes of scratch memory if it can."""
    image_bytes = (n_rows + 2 * HALO) * row_bytes
    if image_bytes <= room:
        many = cdiv(batch, room // image_bytes)
        each = cdiv(batch, many)
        yield from (Band(image, min(each, batch - image), 0, n_rows) for image in range(0, batch, each))
        return
    many = cdiv(n_rows, max(1, room // row_bytes - 2 * HALO))
    each = cdiv(n_rows, many)
    for image in range(batch):
        yield from (Band(image, 1, row, min(each, n_rows - row)) for row in range(0, n_rows, each))


@triton.jit
def locate(tile, start, count, n_columns, ROWS: tl.constexpr, PIXELS: tl.constexpr):
    """Of a tile its image in the band, and its pixels' rows, columns and existence, in `count` rows from `start` on.

    Tiles of several rows share more of their neighbours; those of one follow the image across its rows.
    """
    place = tl.arange(0, PIXELS)
    if ROWS == 1:
        tiles = tl.cdiv(count * n_columns, PIXELS)
        place += tile % tiles * PIXELS
        row = place // n_columns
        column = place % n_columns
        exists = row < count
    else:
        COLUMNS: tl.constexpr = PIXELS // ROWS
        across = tl.cdiv(n_columns, COLUMNS)
        tiles = tl.cdiv(count, ROWS) * across
        row = tile % tiles // across * ROWS + place // COLUMNS
        column = tile % tiles % across * COLUMNS + place % COLUMNS
        exists = (row < count) & (column < n_columns)
    return (tile // tiles).to(tl.int64), start + row, column, exists


@triton.jit
def store_pixels(maps, values, stride_head, stride_row, heads, row, column, n_heads, inside):
    """[heads, pixels] of one image."""
    place = heads[:, None] * stride_head + (row * stride_row + column)[None, :]
    tl.store(maps + place, values.to(maps.dtype.element_ty), mask=(heads < n_heads)[:, None] & inside[None, :])


@triton.jit
def scratch_places(row, column, origin, channels, n_columns, CHANNELS: tl.constexpr):
    """Where [channels, pixels] lie in an image of scratch memory whose first row is `origin`."""
    return ((row - origin) * n_columns + column)[None, :] * CHANNELS + channels[:, None]


@triton.jit
def load_near(scratch, row, column, origin, channels, exists, n_rows, n_columns, CHANNELS: tl.constexpr):
    """[channels, pixels] of neighbours, which may lie outside of the image, in float32."""
    inside = exists & (row >= 0) & (row < n_rows) & (column >= 0) & (column < n_columns)
    place = scratch_places(row, column, origin, channels, n_columns, CHANNELS)
    return tl.load(scratch + place, mask=inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def convolve(
    scratch, weights, row, column, origin, channels, exists, n_rows, n_columns, CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """[GROUP, PIXELS]: each channel convolved with its own 3×3 kernel out of (9, CHANNELS) weights."""
    total = tl.zeros((GROUP, PIXELS), tl.float32)
    # Not unrolled: nine loads would fill the registers, and each would be brought into the layout of a product at hand.
    for down in range(3):
        for across in tl.static_range(3):
            near = load_near(
                scratch, row + (down - 1), column + (across - 1), origin, channels, exists, n_rows, n_columns, CHANNELS
            )
            total += tl.load(weights + (3 * down + across) * CHANNELS + channels)[:, None] * near
    return total


@triton.jit
def relu6(values):
    """Between zero and six."""
    return tl.minimum(tl.maximum(values, 0.0), 6.0)
