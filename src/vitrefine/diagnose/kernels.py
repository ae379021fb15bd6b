"""What learned refinement kernels do to maps, as gains at frequencies (Refiner, Section 3.3).

A kernel w that convolves a map multiplies its frequency (u, v) by |Σ_ab w_ab e^{−i(ua + vb)}|; u along queries, v along
keys. The identity has gain 1 everywhere; a kernel that smooths has less towards π, one that sharpens more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.refiner import Refiner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 17  # frequencies from 0 to π


def kernel_spectrum(kernels: Tensor, steps: int = STEPS) -> Tensor:
    """Gains (maps, steps, steps) of (maps, k, k) kernels, at frequencies from 0 to π."""
    kernels = kernels.detach().double()
    frequencies = torch.linspace(0, math.pi, steps, dtype=torch.float64, device=kernels.device)
    taps = torch.arange(kernels.shape[-1], dtype=torch.float64, device=kernels.device)
    wave = torch.exp(-1j * frequencies[:, None] * taps)
    return (wave @ kernels.to(wave.dtype) @ wave.mT).abs()


@dataclass(frozen=True)
class KernelSpectra:
    """Of each refiner the mean gain of its kernels; prints itself and plots itself."""

    names: Sequence[str]
    gains: Sequence[Tensor]  # (steps, steps)

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"{'gain of refinement kernels':<{width}} at 0   at π (queries, keys, both)"]
        for name, gain in zip(self.names, self.gains, strict=True):
            corners = [gain[0, 0], gain[-1, 0], gain[0, -1], gain[-1, -1]]
            lines.append(f"{name:<{width}} " + "  ".join(f"{value:.3f}" for value in corners))
        return "\n".join(lines)

    def plot(self) -> "Figure":
        from matplotlib.figure import Figure

        columns = min(6, len(self.names))
        rows = -(-len(self.names) // columns)
        figure = Figure(figsize=(1.6 * columns + 0.8, 1.8 * rows), layout="constrained")
        most = max(float(gain.max()) for gain in self.gains)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for axes, name, gain in zip(grid.flat, self.names, self.gains, strict=False):
            image = axes.imshow(gain.cpu().numpy(), vmin=0, vmax=most, cmap="magma", origin="lower")
            axes.set_title(name, fontsize=7)
        figure.colorbar(image, ax=grid, label="gain")
        return figure


def refinement_kernels(model: nn.Module) -> dict[str, Tensor]:
    """The (maps, k, k) kernels of every refiner that convolves."""
    kernels: dict[str, Tensor] = {}
    for name, module in unwrap_model(model).named_modules():
        if isinstance(module, Refiner) and (local := module.mix().local) is not None:
            kernels[name] = local.detach()
        elif isinstance(module, OfficialRefiner):
            kernels[name] = module.local.weight.detach().flatten(0, 1)
    return kernels


def kernel_spectra(model: nn.Module) -> KernelSpectra | None:
    """The gains of all refinement kernels; None where a model has none."""
    kernels = refinement_kernels(model)
    if not kernels:
        return None
    return KernelSpectra(list(kernels), [kernel_spectrum(kernel).mean(dim=0) for kernel in kernels.values()])
