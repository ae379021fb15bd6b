"""matplotlib's figures as inline SVG that takes the page's colours and fonts.

A figure is drawn in stand-in colours, one for each CSS variable of `templates/style.css`; in the SVG they become
`var(--…)`, so that one drawing serves light, dark and paper. Text stays text: it is sharp, found by search, and set in
the reader's font.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SERIES = 8  # colours for specs: --series-0 is the baseline's
_ROLES = ("text", "muted", "line", "surface", *(f"series-{i}" for i in range(SERIES)))
# Colours that nothing else draws with.
_STAND_IN = {role: f"#0a0b{i:02x}" for i, role in enumerate(_ROLES, start=1)}
_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
_MARKERS = "oosD^vPX"
TEXT_SIZE = 12.0
_REFERENCE = re.compile(r'(?:url\(#|href="#)([^)"]+)')
_LONG_DECIMAL = re.compile(r"(\.[0-9]{2})[0-9]+")

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of specs are text, whatever signs they hold
    "axes.unicode_minus": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib; used to measure only
    "font.size": TEXT_SIZE,
    "axes.labelsize": TEXT_SIZE,
    "xtick.labelsize": TEXT_SIZE,
    "ytick.labelsize": TEXT_SIZE,
    "path.simplify_threshold": 0.3,
    "axes.linewidth": 1.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


def colour(role: str) -> str:
    """What to draw with, to get the page's colour for a role: text, muted, line, surface or series-0 to 7."""
    return _STAND_IN[role]


def series_colour(index: int) -> str:
    """The colour of a spec by its place: the baseline has one of its own, the others take turns."""
    return colour(f"series-{series(index)}")


def series(index: int) -> int:
    """The number of a spec's colour by its place."""
    return index if index == 0 else 1 + (index - 1) % (SERIES - 1)


def dashes(index: int) -> str | tuple[int, tuple[float, ...]]:
    """The dashes of a spec's line, which tell it from another one of the same colour."""
    return _DASHES[0 if index == 0 else (index - 1) // (SERIES - 1) % len(_DASHES)]


def css_dashes(index: int) -> str:
    """The same as a value of CSS's stroke-dasharray, for a line of the legend."""
    found = dashes(index)
    return "none" if isinstance(found, str) else " ".join(f"{length:g}" for length in found[1])


def marker(index: int) -> str:
    return _MARKERS[series(index)]


@contextmanager
def drawing(name: str, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many pixels to draw on; `name` keeps its ids apart from those of the page's other figures."""
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        yield Figure(figsize=(width / 72, height / 72))


def axes(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes with margins of so many pixels, with no more ink than it takes to read them."""
    width, height = (side * 72 for side in figure.get_size_inches())
    plot = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )
    plot.set_facecolor("none")
    for side, spine in plot.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colour("line"))
    plot.tick_params(length=0, pad=6, labelcolor=colour("muted"))
    plot.xaxis.label.set_color(colour("muted"))
    plot.yaxis.label.set_color(colour("muted"))
    plot.grid(color=colour("line"), linewidth=0.8)
    plot.set_axisbelow(True)
    return plot


def inline(figure: Figure, name: str, labelled_by: str) -> str:
    """The figure as an `<svg>` element to be put into a page.

    Args:
        figure: Drawn within `drawing`.
        name: As given there.
        labelled_by: The ids of the elements that hold its title and its description.
    """
    file = io.StringIO()
    with warnings.catch_warnings():  # letters that the font lacks: it only measures, and the reader's may have them
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    view_box = root.attrib["viewBox"]
    used = set(_REFERENCE.findall(file.getvalue()))
    for element in root.iter():
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({key: _page_value(key, value, name) for key, value in attributes.items()})
        # Ids that nothing points to would only clash with those of the next figure.
        if attributes.get("id") not in used:
            element.attrib.pop("id", None)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        element.text, element.tail = _trimmed(element.text), _trimmed(element.tail)
    root.attrib.clear()
    root.attrib.update({"class": "chart", "viewBox": view_box, "role": "img", "aria-labelledby": labelled_by})
    return ElementTree.tostring(root, encoding="unicode")


def _page_value(key: str, value: str, name: str) -> str:
    """An attribute's value as the page needs it: ids of its own, variables for colours, fewer decimals."""
    if key == "id":
        return f"{name}-{value}"
    if key == "d":
        return _LONG_DECIMAL.sub(r"\1", " ".join(value.split()))
    value = re.sub(r"(^#|url\(#)", rf"\g<1>{name}-", value) if key in ("href", "clip-path") else value
    if key == "style":
        value = re.sub(r"font: ([0-9.]+px) [^;]*", r"font-size: \1", value)
        family = "font-family: var(--mono); " if "Mono" in value else ""
        value = re.sub(r"font-family: [^;]*;? ?", family, value)
        for role, stand_in in _STAND_IN.items():
            value = value.replace(stand_in, f"var(--{role})")
    return value if key == "style" else _LONG_DECIMAL.sub(r"\1", value)


def _trimmed(text: str | None) -> str | None:
    return text if text and text.strip() else None
