"""How refined attention is cut up: tiles of a kernel, and chunks of work whose maps fit the scratch memory."""

import functools
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrefine.ops.kernels.shapes import cdiv, padded


class Tile(NamedTuple):
    """What one program of a kernel works on, and with how many warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int = 1
    registers: int | None = None  # cap of a thread's registers, where a second resident program is worth more

    def options(self) -> dict[str, int | None]:
        """Launch options of the kernel."""
        return {
            "ROWS": self.rows,
            "KEYS": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


# Measured on an H200 (benchmarks/NOTES.md); a table rather than an autotuner, so that a first step takes no longer.
TILES = {
    "norm": Tile(128, 32, 4),
    "maps": Tile(32, 16, 8),
    "maps_backward": Tile(16, 16, 4, 3),
    "aggregate": Tile(32, 16, 8, 3),
    "grad_mix": Tile(16, 32, 4, 3),
    "grad_scores": Tile(16, 16, 4, 2),
    "grad_keys": Tile(32, 16, 4),
    "grad_values": Tile(16, 16, 4, 2),
    "grad_bias": Tile(16, 32, 8),
}
# For twice the bytes a pixel, or a mask: less at a time.
WIDE_TILES = {
    "norm": Tile(64, 32, 4),
    "maps": Tile(16, 16, 4),
    "maps_backward": Tile(16, 16, 4),
    "aggregate": Tile(16, 16, 4, 2),
    "grad_mix": Tile(16, 16, 4, 2),
    "grad_scores": Tile(16, 16, 4, 2),
    "grad_keys": Tile(16, 16, 4),
    "grad_values": Tile(16, 16, 4, 2),
    "grad_bias": Tile(16, 16, 8),
}
# For twice the channels of a head; measured as the first.
DEEP_TILES = {
    **WIDE_TILES,
    "maps": Tile(32, 16, 8, 2),
    "maps_backward": Tile(16, 16, 4, 3),
    "grad_mix": TILES["grad_mix"],  # which reads maps alone
}
# For more than that: nothing in flight, and more threads to hold the sums.
WIDEST_TILES = {name: tile._replace(warps=8, stages=1) for name, tile in WIDE_TILES.items()}
MULTIPROCESSORS = 132  # of an H200
# Maps of one chunk, all buffers together: enough rows to occupy the GPU, as many forward as the three buffers of the
# backward pass have together, and no less than so many times the queries, which makes a training step take at most 1.5
# times the memory of plain attention's where there are 32 channels a head.
LEAST_BYTES, MOST_BYTES = 84 << 20, 1 << 30
LEAST_ROWS = 3 * 32 * MULTIPROCESSORS
FORWARD_SHARE, BACKWARD_SHARE = 8.0, 4.4
MIX_PROGRAMS = 66  # partial sums of the mix's gradient, for each row of the window


def tiles_for(heads: int, dim: int, item: int, *, masked: bool) -> dict[str, Tile]:
    """The tiles of all kernels, for padded heads, padded channels of a head, and bytes of a value."""
    load = (heads // 16) * (max(dim, 32) // 32) * (item // 2) * (2 if masked else 1)
    if load > 2:
        return WIDEST_TILES
    if load == 1:
        return TILES
    return DEEP_TILES if dim == 64 else WIDE_TILES


class Chunk(NamedTuple):
    """Images, and rows of their maps, that are worked on together."""

    first_image: int
    images: int
    first_out: int
    last_out: int


class Buffer(NamedTuple):
    """Maps of a chunk's images in scratch memory, each with its border of zeros."""

    images: int
    rows: int
    width: int
    heads: int

    def values(self) -> int:
        """How many it holds."""
        return self.images * self.rows * self.width * self.heads


def span(size: int, heads: int) -> int:
    """Values that two neighbouring outputs read of a map's row, padded."""
    return padded((size + 1) * heads)


def buffer(images: int, n_rows: int, n_keys: int, size: int, heads: int) -> Buffer:
    """Rows and columns in pairs, and the whole window of the last pair inside."""
    across = span(size, heads) // heads
    return Buffer(images, (n_rows + 1) // 2 * 2 + size - 1, (n_keys + 1) // 2 * 2 + across - 2, heads)


def windows(maps: torch.Tensor, of: Buffer, n_keys: int, size: int, tile: Tile) -> TensorDescriptor:
    """The overlapping windows of a buffer, (row pairs, 2, column pairs, SPAN), read in such tiles."""
    reach = span(size, of.heads)
    return TensorDescriptor(
        maps,
        shape=[of.images * of.rows // 2, 2, (n_keys + 1) // 2, reach],
        strides=[2 * of.width * of.heads, of.width * of.heads, 2 * of.heads, 1],
        block_shape=[tile.rows // 2, 1, tile.keys // 2, reach],
    )


@functools.cache
def _chunk_images(batch: int, most: int, tiles: int, resident: int) -> int:
    """Images of a chunk, at most `most`, of `tiles` programs each, with which the fewest waves of programs do."""

    def waves(images: int) -> tuple[int, int]:
        full, rest = divmod(batch, images)
        return full * cdiv(images * tiles, resident) + cdiv(rest * tiles, resident), cdiv(batch, images)

    return min(range(1, most + 1), key=waves)


def chunks(
    batch: int, n_queries: int, n_keys: int, size: int, heads: int, item: int, buffers: int, tile: Tile, least: float
) -> list[Chunk]:
    """Whole images where they fit the scratch memory, else runs of rows.

    Of images, as many as fill the GPU a whole number of times with programs of a kernel: of the sizes that fit, that
    with which all chunks together fill it the fewest times.

    Args:
        batch, n_queries, n_keys: Of the maps.
        size: Of the mix.
        heads: Padded.
        item: Bytes of a value.
        buffers: That are needed at once.
        tile: Of the kernel that takes the longest.
        least: Bytes that may be taken at any rate.
    """
    resident = MULTIPROCESSORS * (8 // tile.warps)
    whole = buffer(1, n_queries, n_keys, size, heads)
    row = whole.width * heads * item  # bytes, in one buffer
    row_bytes = row * buffers
    budget = int(min(max(LEAST_BYTES, least, LEAST_ROWS * row), MOST_BYTES))
    most = min(batch, budget // (row_bytes * whole.rows))
    if most >= 1:
        images = _chunk_images(batch, most, cdiv(n_queries, tile.rows), resident)
        return [Chunk(first, min(images, batch - first), 0, n_queries) for first in range(0, batch, images)]
    parts = cdiv(n_queries, max(16, (budget // row_bytes - size + 1) // 16 * 16))
    rows = cdiv(cdiv(n_queries, parts), 16) * 16
    return [
        Chunk(image, 1, first, min(n_queries, first + rows))
        for image in range(batch)
        for first in range(0, n_queries, rows)
    ]
