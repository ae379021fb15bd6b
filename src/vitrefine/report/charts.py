"""What the page's charts have in common."""

from dataclasses import dataclass

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
