"""Charts of evaluations: accuracy over the crop ratio, and accuracy over confidence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from vitrefine.report import svg, words
from vitrefine.report.charts import THIRD, Chart, finished

Found = Mapping[str, Any]
BySpec = Mapping[int, Sequence[Found]]

_HEIGHT = 260.0


def sweep_chart(name: str, by_spec: BySpec, labels: Sequence[str]) -> Chart | None:
    """Accuracy over the crop ratio, on all images of a sweep; None without one."""
    curves = {index: _mean([_sweep(each) for each in found if each.get("rfc")]) for index, found in by_spec.items()}
    curves = {index: curve for index, curve in curves.items() if curve}
    if not curves:
        return None
    best = {index: max((accuracy, ratio) for ratio, accuracy in curve.items()) for index, curve in curves.items()}
    told = "; ".join(
        f"{labels[index]}: {words.number(accuracy, 1)}{words.PER_CENT} at {ratio:g}"
        for index, (accuracy, ratio) in best.items()
    )
    with svg.drawing(name, THIRD, _HEIGHT) as figure:
        plot = svg.axes(figure, left=54, bottom=46, right=10, top=10)
        plot.axvline(1, color=svg.colour("muted"), linewidth=1, linestyle=(0, (4, 3)))
        for index, curve in curves.items():
            _line(plot, index, list(curve), list(curve.values()))
        plot.set_xlabel("crop ratio (above 1: zeros around it)")
        plot.set_ylabel("accuracy (%)")
        plot.xaxis.set_major_locator(MaxNLocator(6))
        plot.yaxis.set_major_locator(MaxNLocator(6))
        title = "Accuracy at other crop ratios"
        return finished(figure, name, title, f"The most on all images: {told}.")


def reliability_chart(name: str, by_spec: BySpec, labels: Sequence[str]) -> Chart | None:
    """Accuracy over confidence, bin by bin; None where no accuracy was measured."""
    curves = {index: _reliability([each for each in found if each.get("accuracy")]) for index, found in by_spec.items()}
    curves = {index: curve for index, curve in curves.items() if curve}
    if not curves:
        return None
    told = "; ".join(
        f"{labels[index]}: {words.listing([f'{sure:.0f} {right:.0f}' for sure, right in curve])}"
        for index, curve in curves.items()
    )
    with svg.drawing(name, THIRD, _HEIGHT) as figure:
        plot = svg.axes(figure, left=54, bottom=46, right=10, top=10)
        plot.plot([0, 100], [0, 100], color=svg.colour("muted"), linewidth=1, linestyle=(0, (4, 3)))
        for index, curve in curves.items():
            _line(plot, index, *([point[i] for point in curve] for i in range(2)))
        plot.set_xlim(0, 102)
        plot.set_ylim(0, 102)
        plot.set_xlabel("how sure it is (%)")
        plot.set_ylabel("how often it is right (%)")
        title = "Is it as often right as it is sure? (dashes: it is)"
        return finished(figure, name, title, f"Confidence and accuracy of each bin in per cent. {told}.")


def _line(plot: Any, index: int, x: Sequence[float], y: Sequence[float]) -> None:
    style = {"linestyle": svg.dashes(index), "marker": svg.marker(index)}
    plot.plot(x, y, color=svg.series_colour(index), linewidth=1.8, markersize=5, **style)


def _sweep(found: Found) -> dict[float, float]:
    """Accuracy by ratio, both halves together."""
    curve = {}
    for point in found["rfc"]["sweep"]:
        halves = [point["chosen_on"], point["tested_on"]]
        images = sum(half["count"] for half in halves)
        curve[float(point["ratio"])] = math.fsum(half["value"] * half["count"] for half in halves) / images
    return curve


def _mean(curves: Sequence[Mapping[float, float]]) -> dict[float, float]:
    """Over runs, where all of them have a value."""
    if not curves:
        return {}
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {ratio: math.fsum(curve[ratio] for curve in curves) / len(curves) for ratio in common}


def _reliability(found: Sequence[Found]) -> list[tuple[float, float]]:
    """Confidence and accuracy of each bin that holds images, those of all runs together."""
    bins: dict[float, list[tuple[int, float, float]]] = {}
    for each in found:
        for row in each["accuracy"]["reliability"]:
            if row["images"]:
                bins.setdefault(row["low"], []).append((row["images"], row["confidence"], row["accuracy"]))
    curve = []
    for _, rows in sorted(bins.items()):
        images = sum(row[0] for row in rows)
        sure, right = (math.fsum(row[0] * row[i] for row in rows) / images for i in (1, 2))
        curve.append((sure, right))
    return curve
