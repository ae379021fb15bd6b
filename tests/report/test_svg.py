"""Charts that take the page's colours: text stays text, ids stay apart, everyone can tell the colours apart."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from vitrefine.report import svg


def drawn(name: str, label: str = "epoch") -> str:
    with svg.drawing(name, 300, 200) as figure:
        plot = svg.axes(figure, left=40, bottom=40, right=10, top=10)
        plot.plot([1, 2, 3], [1, 4, 2], "o-", color=svg.series_colour(1))
        plot.set_xlabel(label)
        return svg.inline(figure, name, f"{name}-title")


def test_text_is_text_and_escaped() -> None:
    found = drawn("a", 'a $x_1$ <b> & "id="')
    assert '>a $x_1$ &lt;b&gt; &amp; "id="</text>' in found


@pytest.mark.filterwarnings("error")
def test_letters_that_the_measuring_font_lacks() -> None:
    assert ">模型</text>" in drawn("a", "模型")


def test_colours_and_fonts_are_the_pages() -> None:
    found = drawn("a")
    assert "var(--series-1)" in found
    assert "var(--muted)" in found
    assert "DejaVu" not in found
    assert not re.search(r"(fill|stroke): #", found)


def test_nothing_but_the_drawing() -> None:
    found = drawn("a")
    assert found.startswith('<svg class="chart" viewBox="0 0 300 200" role="img" aria-labelledby="a-title">')
    for unwanted in ("<?xml", "<!DOCTYPE", "<metadata", "<style", "http", 'width="300'):
        assert unwanted not in found


def test_ids_of_two_charts_differ_and_all_references_lead_somewhere() -> None:
    ids = [set(re.findall(r' id="([^"]+)"', drawn(name))) for name in "ab"]
    assert ids[0]
    assert not ids[0] & ids[1]
    references = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', drawn("a")))
    assert references == ids[0]


def test_the_same_twice() -> None:
    assert drawn("a") == drawn("a")


def test_ten_specs_are_told_apart() -> None:
    looks = [(svg.series_colour(i), svg.dashes(i)) for i in range(22)]
    assert len(set(looks)) == 22


# Colour vision deficiencies as matrices on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson's (2020) space, in which distances are about as large as they look."""
    to_lms = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.63]]
    to_lab = [[0.2105, 0.7936, -0.0041], [1.978, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(rgb, 0, 1))


def contrast(one: str, other: str) -> float:
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def palette(theme: str) -> dict[str, str]:
    style = (files("vitrefine.report") / "templates" / "style.css").read_text()
    first, second = style.split("prefers-color-scheme: dark")[:2]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", first if theme == "light" else second))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_palette(theme: str) -> None:
    colours = palette(theme)
    series = [colours[f"series-{i}"] for i in range(svg.SERIES)]
    assert all(contrast(colour, colours["page"]) >= 3 for colour in series)
    for text in ("text", "muted", "accent", "better", "worse"):
        assert contrast(colours[text], colours["page"]) >= 4.5
        assert contrast(colours[text], colours["raised"]) >= 4.5
    for matrix in DEFICIENCIES.values():
        seen = [oklab(np.array(matrix) @ linear(colour)) for colour in series]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.07
