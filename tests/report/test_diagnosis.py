"""The page of a diagnosis: whole, self-contained, in words first; and as a browser sees it."""

import importlib.util
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vitrefine.diagnose.subject import open_subject
from vitrefine.report import svg
from vitrefine.report.diagnosis import Examined, examine, render, write_diagnosis
from vitrefine.report.diagnosis_charts import _keep_flat

VIT = "vit_tiny_patch16_224(depth=3,embed_dim=48,img_size=32,num_heads=3,patch_size=4)"
LIT = "lit_ti(img_size=64)"
SWIN = "swin_tiny_patch4_window7_224(depths=[1,1],embed_dim=12,img_size=32,num_heads=[2,2],patch_size=2,window_size=2)"

_SPEC = importlib.util.spec_from_file_location("pages", Path(__file__).with_name("test_page.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
pages: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pages)


@pytest.fixture(scope="module")
def vit() -> Examined:
    return examine(open_subject(VIT), "digits", 12)


@pytest.fixture(scope="module")
def refined() -> Examined:
    return examine(open_subject(f"{VIT}+refiner+cb_s"), "digits", 12)


def page_of(*examined: Examined) -> Any:
    html = render(examined, ["vitrefine", "diagnose", "x <y>"])
    assert len(html.encode()) < 2_000_000
    page = pages.Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert page.references <= set(page.ids)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for address in page.addresses:
        assert address.startswith("data:image/") or address[1:] in page.ids
    assert not re.search(r"url\((?!#)|@import|https?:", html)
    return page


def test_what_it_means_comes_first(vit: Examined) -> None:
    text = page_of(vit).text
    start = text.index("vitrefine · diagnosis · digits · 12 images")
    assert text[start:].partition("12 images ")[2].startswith("All layers are nearly uniform: attention has")
    for said in (
        "no training: random weights",
        "Entropy of attention",
        "How far attention reaches",
        "Similarity of tokens",
        "similarity of blocks (CKA)",
        "What a query attends to",
        "blocks.2.attn",
        "vitrefine diagnose 'x <y>'",
    ):
        assert said in text
    assert "after refinement" not in text


def test_two_models_side_by_side(vit: Examined, refined: Examined) -> None:
    text = page_of(vit, refined).text
    assert "+refiner+cb_s attends much as" in text
    assert "dashed: after refinement" in text
    assert "CB_S has learned nothing yet" in text
    assert "+refiner+cb_s: gains of 3 refinement kernels" in text
    assert "block, 0 its input" in text
    assert "1 the input" not in text  # two charts that count alike


def test_no_legend_without_a_chart(vit: Examined) -> None:
    html = render([vit, examine(open_subject(f"{VIT}+refiner"), "digits", 12)])
    learned = html[html.index("What its modifications have learned") : html.index("gains of 3 refinement kernels")]
    assert "legend" not in learned


def test_names_in_the_head_of_a_narrow_column_may_break(vit: Examined, refined: Examined) -> None:
    head = '<span class="spec">vit_<wbr>tiny_<wbr>patch16_<wbr>224</span><br>last layer</th>'
    assert head in render([vit, refined])


def test_pyramids_and_windows() -> None:
    page = page_of(examine(open_subject(LIT), "digits", 4))
    assert "where token merging reads: the points behind 2 output tokens, 64 each" in page.text
    assert "merging" in page.pieces  # which is what the chart of offsets counts
    text = page_of(examine(open_subject("lit_ti(img_size=32)"), "digits", 4)).text
    assert "the points behind 1 output token, 64 each" in text
    text = page_of(examine(open_subject(SWIN), "digits", 4)).text
    assert "sees the whole image at once, so no map can be drawn" in text


def test_layers_are_counted_in_the_model() -> None:
    """Of a pyramid, only the last layers see the whole image."""
    page = page_of(examine(open_subject("pvt_small(img_size=64,depths=[1,1,1,2])"), "digits", 4))
    strips = page.text[page.text.index("What a query attends to") : page.text.index("The figures")]
    assert "layer 4" in strips
    assert "layer 1" not in strips


def test_pictures_of_maps_are_square(vit: Examined) -> None:
    """Of a pyramid there may be sixty queries to a key, and a picture so much higher than it is wide."""
    assert re.search(r"\.matrices img {[^}]* aspect-ratio: 1;", render([vit]))


def test_a_headline_leaves_names_as_they_are(vit: Examined) -> None:
    sharp = vit.diagnosis["entropy"]
    layers = tuple(replace(layer, whole=replace(layer.whole, mean=0.5)) for layer in sharp.layers)
    profiles = {**vit.diagnosis.profiles, "entropy": replace(sharp, layers=layers)}
    other = replace(vit, name="lit_ti", diagnosis=replace(vit.diagnosis, profiles=profiles))
    assert "<h1>lit_ti attends more sharply than " in render([vit, other])


def test_a_model_beside_itself_is_called_by_its_short_name(vit: Examined) -> None:
    assert "<title>Diagnosis of vit_tiny_patch16_224 (first) and vit_tiny_patch16_224 (second)</title>" in render(
        [vit, replace(vit, weights="trained")]
    )


def test_what_is_the_same_in_all_layers_looks_so() -> None:
    with svg.drawing("flat", 300, 200) as figure:
        plot = svg.axes(figure, left=60, bottom=40, right=10, top=10)
        plot.plot([1, 2, 3], [0.5, 0.5, 0.5 + 1e-6])
        _keep_flat(plot)
        low, high = plot.get_ylim()
        assert high - low == pytest.approx(0.005, rel=0.01)
        assert low < 0.5 < high
        plot.plot([1, 2, 3], [0.1, 0.5, 0.6])
        plot.autoscale()
        before = plot.get_ylim()
        _keep_flat(plot)
        assert plot.get_ylim() == before


def test_names_are_text(vit: Examined) -> None:
    evil = replace(vit, name='<script>alert("x")</script>', data="<img src=x onerror=alert(1)>")
    assert "<script>alert" in page_of(evil).text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def seen_by_a_browser(page: Path, folder: Path) -> tuple[int, str, set[str]]:
    """The size of a picture of a page, what the browser wrote, and what the page itself asked the web for."""
    folder.mkdir()
    shot, log = folder / "page.png", folder / "requests.json"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        "--window-size=1200,3000",
        f"--screenshot={shot}",
        page.as_uri(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    asked = re.findall(r'"network_isolation_key":"file://.*?"url":"([^"]*)"', log.read_text(errors="replace"))
    return shot.stat().st_size, result.stderr, {url for url in asked if url.startswith("http")}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to look at the page with")
def test_a_browser_shows_it_without_complaint(vit: Examined, refined: Examined, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_diagnosis([vit, refined], page)
    size, said, asked = seen_by_a_browser(page, tmp_path / "good")
    assert size > 50_000  # a blank page is a few kilobytes
    assert "CONSOLE" not in said
    assert asked == set()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to look at the page with")
def test_the_browser_would_have_told(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("oh")</script>')
    size, said, asked = seen_by_a_browser(page, tmp_path / "bad")
    assert size < 50_000
    assert "CONSOLE" in said
    assert asked == {"http://127.0.0.1:9/x.png"}
