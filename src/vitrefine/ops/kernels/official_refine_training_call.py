"""What the kernels of one call in training share: sizes, scratch memory, padded weights, launches."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.official_refine_tiles import GROUP, HALO, LEAST_ROOM, Band, bands
from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.shapes import cdiv, padded


class Tile(NamedTuple):
    """Pixels at a time, warps, programs that share the tiles of a launch (0: one a tile), and rows of a tile."""

    pixels: int
    warps: int
    shares: int = 0
    rows: int = 1


TILES = {
    "gram": Tile(128, 4, 528),
    "expand": Tile(128, 4),
    "convolved": Tile(64, 4, 352, rows=8),
    "reduce": Tile(64, 2, rows=8),
    "blend": Tile(128, 4),
    "products": Tile(64, 4, 2112),
    "norm_sums": Tile(32, 1, 528),
    "grad_convolved": Tile(128, 4, rows=8),
    "grad_expanded": Tile(64, 4, 88, rows=8),
    "contract": Tile(16, 1, 1584),
    "grad_maps": Tile(64, 4),
}


class Call:
    """One call, forward or backward.

    Args:
        launch: Launches its kernels.
        maps: (B, H, Nq, Nk), rows contiguous.
        hidden: Maps that are convolved, H'.
        backward: Whether gradients are laid out beside what is expanded.
    """

    def __init__(self, launch: Launcher, maps: Tensor, hidden: int, *, backward: bool) -> None:
        self.launch, self.maps = launch, maps
        self.batch, self.n_heads, self.n_rows, self.n_columns = maps.shape
        self.n = self.batch * self.n_rows * self.n_columns
        self.heads, self.hidden = padded(self.n_heads), hidden
        self.groups = cdiv(hidden, GROUP.value)
        self.stored = self.groups * GROUP.value
        row_bytes = self.n_columns * maps.element_size() * (2 * self.stored + self.heads if backward else self.stored)
        room = max(LEAST_ROOM, maps.numel() * maps.element_size())
        self.bands = list(bands(self.batch, self.n_rows, row_bytes, room))
        self.buffer = self.bands[0].images, self.bands[0].rows + 2 * HALO, self.n_columns
        # Between zero and six, float16 has three bits more.
        self.clipped = torch.float16 if maps.dtype == torch.bfloat16 else maps.dtype
        self.products = {"PRECISION": product_precision(maps.dtype)}

    def scratch(self, channels: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a band, channels innermost; in the type of the maps if None."""
        return self.maps.new_empty((*self.buffer, channels), dtype=dtype)

    def fill(self, shape: tuple[int, ...], values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values with zeros after them."""
        filled = values.new_zeros(shape, dtype=dtype)
        filled[tuple(slice(n) for n in values.shape)] = values
        return filled

    def rows(self, width: int, *rows: Tensor) -> Tensor:
        """Vectors of channels as padded rows."""
        return self.fill((len(rows), width), torch.stack(rows))

    def partial(self, name: str, *shape: int, whole: bool = False) -> Tensor:
        """Room for what each program leaves: in one launch over everything, or in one for each band."""
        everything = Band(0, self.batch, 0, self.n_rows)
        launches, largest = (1, everything) if whole else (len(self.bands), self.bands[0])
        return self.maps.new_empty((launches, self._programs(name, largest), *shape), dtype=torch.float32)

    def _tiles(self, name: str, band: Band, halo: int = 0) -> int:
        (_, count), tile = band.around(halo, self.n_rows), TILES[name]
        if tile.rows == 1:
            return band.images * cdiv(count * self.n_columns, tile.pixels)
        return band.images * cdiv(count, tile.rows) * cdiv(self.n_columns, tile.pixels // tile.rows)

    def _programs(self, name: str, band: Band) -> int:
        return min(TILES[name].shares or self.n, self._tiles(name, band))

    def everywhere(self, name: str, kernel: Any, *arguments: object, **constants: object) -> None:
        """Launch over all pixels of all images."""
        band = Band(0, self.batch, 0, self.n_rows)
        sizes: tuple[int, ...] = (self.n_heads, self.n_rows, self.n_columns)
        if TILES[name].shares:
            sizes = (self._tiles(name, band), *sizes)
        self._launch(name, kernel, (self._programs(name, band), 1, 1), (*arguments, *sizes), constants)

    def on_band(
        self, name: str, kernel: Any, band: Band, *arguments: object, halo: int = 0, grouped: bool = True,
        **constants: object,
    ) -> None:  # fmt: skip
        """Launch over a band, with so many rows more on either side; by groups of channels, or with all at once."""
        n_tiles = self._tiles(name, band, halo)
        programs = self._programs(name, self.bands[0]) if TILES[name].shares else n_tiles
        place: tuple[int, ...] = (*band.around(halo, self.n_rows), band.row - HALO, self.buffer[1], n_tiles)
        if not grouped:
            place = (band.image, *place, self.n_heads)
        grid = (programs, self.groups if grouped else 1, 1)
        constants = {"STORED": self.stored, "ROWS": TILES[name].rows, **constants}
        self._launch(name, kernel, grid, (*arguments, *place, self.n_rows, self.n_columns), constants)

    def _launch(
        self, name: str, kernel: Any, grid: tuple[int, int, int], arguments: tuple[object, ...],
        constants: dict[str, object],
    ) -> None:  # fmt: skip
        tile = TILES[name]
        self.launch(kernel, grid, *arguments, PIXELS=tile.pixels, num_warps=tile.warps, num_stages=1, **constants)
