"""What the page's charts have in common."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrefine.report import svg

WIDE, THIRD = 780.0, 345.0  # pixels, of a chart on its own and of one of three side by side


@dataclass(frozen=True)
class Chart:
    """One figure of the page: a title that says what is seen, the same in words for who cannot see it, the drawing."""

    name: str  # its id in the page
    title: str
    description: str
    svg: str


def finished(figure: Figure, name: str, title: str, description: str) -> Chart:
    """The chart of a figure that has been drawn, to be called within `svg.drawing`."""
    return Chart(name, title, description, svg.inline(figure, name, f"{name}-title {name}-description"))


def ceiling(plot: Axes, text: str) -> None:
    """A dashed line at 100 per cent, with its meaning above its right end."""
    ink = svg.colour("muted")
    plot.axhline(100, color=ink, linewidth=1.2, linestyle=(0, (4, 3)))
    plot.annotate(
        text,
        (1, 100),
        xycoords=plot.get_yaxis_transform(),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color=ink,
    )
