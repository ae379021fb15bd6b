"""The chart of entropies: how evenly each layer attends, beside uniform attention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vitrefine.report import svg, words
from vitrefine.report.charts import WIDE, Chart, ceiling, finished
from vitrefine.report.findings import short_names
from vitrefine.report.results import Group


@dataclass(frozen=True)
class LayerEntropy:
    """The entropy of a layer's attention, head by head, and that of uniform attention."""

    heads: tuple[float, ...]
    bound: float

    @property
    def shares(self) -> list[float]:
        """Per cent of the bound, head by head."""
        return [100 * entropy / self.bound if self.bound else 100.0 for entropy in self.heads]

    @property
    def share(self) -> float:
        return math.fsum(self.shares) / len(self.heads)


def entropies(name: str, group: Group, layers: Mapping[int, Sequence[LayerEntropy]]) -> Chart | None:
    """Entropy of attention layer by layer, as a share of what uniform attention has.

    Args:
        name: The chart's id.
        group: Its specs.
        layers: By the place of a spec; specs without attention are not there.
    """
    if not layers:
        return None
    labels = [short_names(group)[arm.label] for arm in group.arms]
    means = {labels[index]: math.fsum(layer.share for layer in found) / len(found) for index, found in layers.items()}
    told = ", ".join(f"{label} {value:.0f}{words.PER_CENT}" for label, value in means.items())
    with svg.drawing(name, WIDE, 320) as figure:
        plot = svg.axes(figure, left=54, bottom=46, right=14, top=26)
        for place, (index, found) in enumerate(layers.items()):
            # Side by side, so that the ranges of two specs do not hide one another.
            _draw(plot, index, found, shift=0.5 * ((place + 0.5) / len(layers) - 0.5))
        ceiling(plot, "uniform attention")
        least = min(min(layer.shares) for found in layers.values() for layer in found)
        bottom = max(0, 10 * math.floor(least / 10) - 10)
        plot.set_ylim(bottom, 100 + 0.02 * (100 - bottom))
        plot.set_xlim(0.4, max(map(len, layers.values())) + 0.6)
        plot.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        plot.grid(visible=False, axis="x")
        plot.set_xlabel("attention layer")
        plot.set_ylabel("entropy (% of uniform)")
        return finished(figure, name, _title(means), f"Means over layers and heads: {told}.")


def _draw(plot: Axes, index: int, layers: Sequence[LayerEntropy], shift: float) -> None:
    colour = svg.series_colour(index)
    places = [layer + shift for layer in range(1, len(layers) + 1)]
    low, high = ([end(layer.shares) for layer in layers] for end in (min, max))
    plot.vlines(places, low, high, color=colour, linewidth=2, alpha=0.4)
    means = [layer.share for layer in layers]
    style = {"linestyle": svg.dashes(index), "marker": svg.marker(index)}
    plot.plot(places, means, color=colour, linewidth=1.6, markersize=5.5, **style)  # type: ignore[arg-type]


def _title(means: Mapping[str, float]) -> str:
    shares = {label: f"{share:.0f}{words.PER_CENT}" for label, share in means.items()}
    most = shares[max(means, key=lambda label: means[label])]
    amount = f"{most} of the entropy of uniform attention"
    if len(means) == 1:
        return f"Attention has {amount}"
    tied = [label for label, share in shares.items() if share == most]
    return f"{words.specs(tied)} {'attends' if len(tied) == 1 else 'attend'} most evenly, with {amount}"
