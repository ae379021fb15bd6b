"""Attention maps as matrices, queries down and keys across, before and after refinement (Refiner, Figure 5).

Upright stripes are tokens that all others look at; the diagonal is attention to oneself, bands beside it to neighbours.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.diagnose.call import Call
from vitrefine.diagnose.capture import Attention, capture
from vitrefine.diagnose.evaluation import evaluating
from vitrefine.surgery.selection import Layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 256  # of the largest matrix: more tokens are averaged in groups, so that no whole map is there


@dataclass(frozen=True)
class AttentionMatrix:
    """The maps of a layer, mean of its heads and of the images."""

    name: str
    before: Tensor  # (queries, keys)
    after: Tensor | None  # None where nothing refines them


@dataclass(frozen=True)
class AttentionMatrices:
    """Of some layers; prints itself and plots itself."""

    layers: Sequence[AttentionMatrix]

    def __str__(self) -> str:
        lines = ["attention to oneself, mean over tokens: before refinement, and after"]
        for layer in self.layers:
            own = [layer.before] if layer.after is None else [layer.before, layer.after]
            lines.append(f"{layer.name} " + " ".join(f"{matrix.diagonal().mean().item():.4f}" for matrix in own))
        return "\n".join(lines)

    def plot(self) -> "Figure":
        from matplotlib.figure import Figure

        rows = 2 if any(layer.after is not None for layer in self.layers) else 1
        figure = Figure(figsize=(2 * len(self.layers), 2.2 * rows), layout="constrained")
        grid = figure.subplots(rows, len(self.layers), squeeze=False)
        for column, layer in enumerate(self.layers):
            grid[0, column].set_title(layer.name, fontsize=7)
            for row, matrix in enumerate([layer.before, layer.after][:rows]):
                grid[row, column].set_axis_off()
                if matrix is not None:
                    grid[row, column].imshow(shades(matrix).numpy(), cmap="magma", vmin=0, vmax=1)
        return figure


def shades(matrix: Tensor) -> Tensor:
    """A matrix from 0 to 1 for the eye: roots, for few entries are great, up to the brightest but one in a thousand."""
    roots = matrix.clamp(min=0).sqrt()
    return (roots / torch.quantile(roots.flatten(), 0.999).clamp(min=1e-12)).clamp(max=1)


@torch.no_grad()
def attention_matrices(model: nn.Module, images: Tensor, layers: Layers = "all") -> AttentionMatrices:
    """The maps of layers, mean over heads and images; a layer of windows gives that of its mean window.

    Args:
        model: Any model whose attention can be captured.
        images: (B, C, H, W).
        layers: Which attentions, counted from 0.
    """
    found: list[AttentionMatrix] = []

    def look(attention: Attention, call: Call) -> None:
        after = _matrix(call, refined=True) if call.is_refined else None
        found.append(AttentionMatrix(attention.name, _matrix(call, refined=False), after))

    with evaluating(model), capture(model, layers, on_call=look):
        model(images)
    return AttentionMatrices(found)


def _matrix(call: Call, refined: bool) -> Tensor:
    """Image by image; where tokens are many, one group of queries after the other."""
    images, _, queries, keys = call.shape
    height, width = min(queries, SIDE), min(keys, SIDE)
    ends = [number * queries // height for number in range(height + 1)] if queries > SIDE else [0, queries]
    make = call.refined_maps if refined else call.maps
    total: Tensor | None = None
    for image in range(images):
        rows = []
        for start, stop in itertools.pairwise(ends):
            part = make(slice(image, image + 1), slice(start, stop)).float().mean(dim=(0, 1))
            rows.append(part.mean(dim=0, keepdim=True) if queries > SIDE else part)
        matrix = F.adaptive_avg_pool1d(torch.cat(rows)[None], width)[0]
        total = matrix if total is None else total + matrix
    assert total is not None
    return (total / images).cpu()
