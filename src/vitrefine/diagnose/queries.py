"""What one query attends to, block by block and head by head, averaged over images (LIT, Figure 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from vitrefine.diagnose.grid import TokenGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class QueryMaps:
    """Attention of a query by layer and head; prints itself and plots itself."""

    query: str
    names: Sequence[str]
    maps: Sequence[Tensor]  # of each layer (heads, h, w), rows of sums at most one
    images: int
    numbers: Sequence[int]  # of the layers in the model, from 1

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"attention of the {self.query}, mean of {self.images} images: the share that its greatest patch gets"]
        for name, maps in zip(self.names, self.maps, strict=True):
            most = maps.flatten(1).amax(dim=1).tolist()
            lines.append(f"{name:<{width}} " + " ".join(f"{value:.2f}" for value in most))
        return "\n".join(lines)

    def plot(self) -> "Figure":
        from matplotlib.figure import Figure

        columns = max(len(maps) for maps in self.maps)
        figure = Figure(figsize=(0.55 * columns + 1.2, 0.55 * len(self.maps)), layout="constrained")
        grid = figure.subplots(len(self.maps), columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, (name, maps) in enumerate(zip(self.names, self.maps, strict=True)):
            grid[row, 0].text(-0.15, 0.5, name, ha="right", va="center", fontsize=6, transform=grid[row, 0].transAxes)
            for head, heat in enumerate(maps):
                grid[row, head].imshow(heat.numpy(), cmap="magma")
        return figure


def middle(grid: TokenGrid) -> int:
    """The token of the patch in the middle."""
    return grid.prefix + grid.height // 2 * grid.width + grid.width // 2
