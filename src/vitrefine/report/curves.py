"""Curves of training, epoch by epoch: the mean over seeds as a line, each seed as a thin one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vitrefine.report import svg, words
from vitrefine.report.charts import THIRD, Chart, finished
from vitrefine.report.findings import short_names
from vitrefine.report.results import Arm, Group
from vitrefine.train.run import Epoch

_RISE = 0.15  # share of the epochs that may run out of the frame
_POINTS = 300  # of a curve; more could not be seen

Curve = dict[int, float]  # by epoch


@dataclass(frozen=True)
class Quantity:
    """What is drawn: its key in the metrics, its names, and how it is printed."""

    key: str
    name: str
    axis: str
    decimals: int
    unit: str = ""
    more_is_better: bool = False


QUANTITIES = (
    Quantity("top1", "Test accuracy", "test accuracy (%)", 1, words.PER_CENT, more_is_better=True),
    Quantity("train_loss", "Training loss", "training loss", 3),
    Quantity("test_loss", "Test loss", "test loss", 3),
)


def curves(name: str, group: Group) -> list[Chart]:
    """A chart for each quantity that some run has written down."""
    drawn = (_chart(f"{name}-{quantity.key}", group, quantity) for quantity in QUANTITIES)
    return [chart for chart in drawn if chart]


def _chart(name: str, group: Group, quantity: Quantity) -> Chart | None:
    ends: dict[str, float] = {}
    settled: list[float] = []
    longest = 0
    names = short_names(group)
    with svg.drawing(name, THIRD, 260) as figure:
        plot = svg.axes(figure, left=52, bottom=44, right=8, top=8)
        for index, arm in enumerate(group.arms):
            whole, broken = _lines(arm, quantity.key)
            longest = max(longest, *map(len, whole + broken), 0)
            settled += [value for line in whole + broken for epoch, value in line.items() if epoch > _RISE * max(line)]
            end = _draw(plot, index, whole, broken)
            if end is not None:
                ends[names[arm.label]] = end
        if longest < 2:  # nothing was measured, or at the end alone, which the tables tell
            return None
        # What the first epochs gain would leave little room to tell the last ones apart.
        low, high = min(settled), max(settled)
        margin = 0.06 * (high - low) or 0.5
        plot.set_ylim(low - margin, high + margin)
        plot.set_xlabel("epoch")
        plot.set_ylabel(quantity.axis)
        plot.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        plot.yaxis.set_major_locator(MaxNLocator(6))
        plot.grid(visible=False, axis="x")
        told = ", ".join(f"{label} {_shown(value, quantity)}" for label, value in ends.items())
        description = f"At the end: {told}." if told else "No run has come to its end."
        return finished(figure, name, _title(quantity, ends), description)


def _lines(arm: Arm, key: str) -> tuple[list[Curve], list[Curve]]:
    """The curves of the finished runs, and of the others."""
    whole, broken = (
        [line for line in (_line(run.epochs, key) for run in runs) if line]
        for runs in (arm.finished.values(), arm.unfinished)
    )
    return whole, broken


def _line(epochs: Sequence[Epoch], key: str) -> Curve:
    values = {line.epoch: getattr(line, key) for line in epochs}
    found = {epoch: value for epoch, value in values.items() if value is not None and math.isfinite(value)}
    every = 1 + len(found) // _POINTS
    return {epoch: value for epoch, value in found.items() if epoch % every == 0 or epoch == max(found)}


def _draw(plot: Axes, index: int, whole: Sequence[Curve], broken: Sequence[Curve]) -> float | None:
    """Draw a spec; the mean at the end, if a run has come to its end."""
    style: dict[str, Any] = {"color": svg.series_colour(index), "linestyle": svg.dashes(index)}
    if len(whole) > 1 or broken:
        for line in (*whole, *broken):
            plot.plot(list(line), list(line.values()), linewidth=0.8, alpha=0.35, **style)
    # Over finished runs only: a mean would jump where one of its runs breaks off.
    common = sorted(set.intersection(*map(set, whole))) if whole else []
    if not common:
        return None
    means = [math.fsum(line[epoch] for line in whole) / len(whole) for epoch in common]
    plot.plot(common, means, linewidth=2.2, zorder=3, **style)
    plot.plot(common[-1:], means[-1:], svg.marker(index), color=style["color"], markersize=6, zorder=4)
    return means[-1]


def _shown(value: float, quantity: Quantity) -> str:
    return f"{words.number(value, quantity.decimals)}{quantity.unit}"


def _title(quantity: Quantity, ends: Mapping[str, float]) -> str:
    if not ends:
        return f"{quantity.name}, epoch by epoch"
    best = _shown((max if quantity.more_is_better else min)(ends.values()), quantity)
    if len(ends) == 1:
        return f"{quantity.name} ends at {best}"
    tied = [label for label, end in ends.items() if _shown(end, quantity) == best]
    verb = "ends" if len(tied) == 1 else "end"
    where = "highest" if quantity.more_is_better else "lowest"
    return f"{quantity.name}: {words.specs(tied)} {verb} {where}, at {best}"
