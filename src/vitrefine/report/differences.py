"""The chart of differences: a dot and an interval a spec."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vitrefine.report import svg, words
from vitrefine.report.charts import WIDE, Chart, finished
from vitrefine.report.findings import Row, baseline_name, short_names
from vitrefine.report.results import Group

_PITCH, _TOP, _BOTTOM = 56.0, 26.0, 44.0  # pixels: from row to row, and margins
_LEFT = 18.0  # half of a tick's label, which may stand at the very edge
_LETTER = 7.5  # pixels of a figure's digits, in the widest of fonts
_LONGEST = 78  # letters of a name


def differences(name: str, group: Group, table: Sequence[Row]) -> Chart | None:
    """How much more accurate each spec is than the baseline; None if nothing can be compared."""
    shown = [(index, row) for index, row in enumerate(table) if row.difference is not None]
    if not shown:
        return None
    names = short_names(group)
    told = "; ".join(f"{names[row.label]}: {_figure(row)}" for _, row in shown)
    with svg.drawing(name, WIDE, _TOP + _PITCH * len(shown) + _BOTTOM) as figure:
        right = 20 + _LETTER * max(len(_figure(row)) for _, row in shown)
        plot = svg.axes(figure, left=_LEFT, bottom=_BOTTOM, right=right, top=_TOP)
        plot.set_ylim(len(shown), 0)
        plot.set_yticks([])
        plot.axvline(0, color=svg.colour("muted"), linewidth=1.2)
        for place, (index, row) in enumerate(shown):
            _draw(plot, index, row, group, place)
        low, high = plot.get_xlim()
        # Zero is always seen, with some room on either side.
        room = 0.06 * max(abs(low), abs(high), 0.1)
        plot.set_xlim(min(low, -room), max(high, room))
        plot.xaxis.set_major_locator(MaxNLocator(7))
        plot.xaxis.set_major_formatter(lambda value, _: words.number(value, 6, signed=True).rstrip("0").rstrip("."))
        plot.set_xlabel("difference in accuracy (percentage points)")
        above: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
        plot.annotate("no effect", (0, 1), xycoords=plot.get_xaxis_transform(), color=svg.colour("muted"), **above)
        return finished(figure, name, _title(shown), f"Differences to {baseline_name(group)} in points. {told}.")


def _title(shown: Sequence[tuple[int, Row]]) -> str:
    signs = [row.difference.sign for _, row in shown if row.difference]
    apart = sum(map(bool, signs))
    if len(shown) == 1 and signs[0] is None:
        return "The difference is the same in every seed"
    if len(shown) == 1:
        return f"The interval of the difference {'excludes' if apart else 'includes'} zero"
    if apart == len(shown):
        return f"All {apart} differences are clear of zero"
    return f"{apart or 'None'} of {len(shown)} differences {'is' if apart < 2 else 'are'} clear of zero"


def _draw(plot: Axes, index: int, row: Row, group: Group, place: int) -> None:
    found = row.difference
    assert found is not None
    colour, y = svg.series_colour(index), place + 0.62
    if found.low is not None and found.high is not None:
        plot.plot([found.low, found.high], [y, y], color=colour, linewidth=2.5)
    if found.over == "seeds":
        base, own = group.baseline.right, row.arm.right
        seeds = [100 * float(own[seed].mean() - base[seed].mean()) for seed in sorted(base.keys() & own.keys())]
        plot.plot(seeds, [y + 0.17] * len(seeds), "|", color=colour, markersize=6, markeredgewidth=1.2)
    # Filled where the interval excludes zero, hollow where it does not: legible without any colour.
    face = colour if found.sign else svg.colour("surface")
    plot.plot(found.value, y, "o", color=colour, markerfacecolor=face, markersize=9, markeredgewidth=2)
    label = short_names(group)[row.label]
    label = label if len(label) <= _LONGEST else f"{label[: _LONGEST - 20]}…{label[-18:]}"
    beside, ink = plot.get_yaxis_transform(), svg.colour("text")
    edge: dict[str, Any] = {"xytext": (1 - _LEFT, 0), "textcoords": "offset points"}
    plot.annotate(label, (0, y - 0.33), xycoords=beside, va="center", color=ink, family="monospace", **edge)
    plot.text(1.015, y, _figure(row), transform=beside, va="center", color=ink)


def _figure(row: Row) -> str:
    found = row.difference
    assert found is not None
    digits = words.enough(found, row.decimals)
    ends = words.interval(found, digits, signed=True)
    return words.number(found.value, digits, signed=True) + (f" ({ends})" if ends else "")
