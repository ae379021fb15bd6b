"""Positions that work at any resolution: absolute embeddings and a relative bias, resized when the grid changes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.ops.relative_attention import spread_table

Grid = tuple[int, int]


def resize_position(position: Tensor, old: Grid, new: Grid, *, mode: str = "bicubic") -> Tensor:
    """Resize (1, P + h·w, C) embeddings from one grid to another; the P embeddings of class tokens stay.

    Args:
        position: Embeddings, class tokens first.
        old: Grid that the embeddings were made for.
        new: Grid wanted.
        mode: `bicubic`, or `bilinear` with the corners kept (the Refiner authors' rule inside the model).
    """
    if old == new:
        return position
    aside, patches = position.split([position.shape[1] - old[0] * old[1], old[0] * old[1]], dim=1)
    patches = patches.unflatten(1, old).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, new, mode=mode, align_corners=mode == "bilinear")
    return torch.cat([aside, patches.flatten(2).transpose(1, 2)], dim=1)


class RelativePositionBias(nn.Module):
    """A learned bias for each head and each displacement of query against key, over the whole map.

    The table has one row a displacement, (2h-1)(2w-1) of them, as Swin's has for a window; for another grid it is
    resized bicubically.
    """

    def __init__(
        self,
        num_heads: int,
        grid: Grid,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.built_for = grid
        rows = (2 * grid[0] - 1) * (2 * grid[1] - 1)
        self.table = nn.Parameter(torch.empty(rows, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=0.02)

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Have the table made for another grid."""
        resized = self.resized(grid).flatten(1).T.clone(memory_format=torch.contiguous_format)
        self.table = nn.Parameter(resized, self.table.requires_grad)
        self.built_for = grid

    def resized(self, grid: Grid) -> Tensor:
        """(heads, 2h-1, 2w-1): the table for a grid."""
        height, width = grid
        table = self.table.T.unflatten(1, (2 * self.built_for[0] - 1, 2 * self.built_for[1] - 1))
        if grid == self.built_for:
            return table
        return F.interpolate(table[None], (2 * height - 1, 2 * width - 1), mode="bicubic", align_corners=False)[0]

    def forward(self, grid: Grid) -> Tensor:
        """(heads, h·w, h·w)."""
        return spread_table(self.resized(grid), grid)
