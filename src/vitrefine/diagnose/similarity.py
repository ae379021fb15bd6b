"""How alike the representations between the blocks of a model are, each with each: the layer × layer matrix of CKA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SimilarityMatrix:
    """CKA of every pair; prints itself and plots itself."""

    names: Sequence[str]
    values: Tensor  # (names, names)

    def __str__(self) -> str:
        width = max(map(len, self.names))
        rows = [" ".join(f"{value:5.2f}" for value in row) for row in self.values.tolist()]
        lines = [f"{name:<{width}} {row}" for name, row in zip(self.names, rows, strict=True)]
        return "\n".join(["similarity of representations (CKA), 1 if they are alike", *lines])

    def plot(self) -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6, 4), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(self.values.numpy(), vmin=0, vmax=1, cmap="magma", origin="lower")
        figure.colorbar(image, ax=axes, label="CKA")
        axes.set_xlabel("block (0: input)")
        axes.set_ylabel("block (0: input)")
        return figure
