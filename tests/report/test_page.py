"""The page: whatever the runs, it is whole, self-contained and says what there is."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from vitrefine.report import section
from vitrefine.report.attention import Cell, Look, Picture
from vitrefine.report.collect import collect
from vitrefine.report.entropies import LayerEntropy, entropies
from vitrefine.report.page import render, write_page
from vitrefine.report.plan import Plan, write_plan

BASE = "vit_tiny_patch16_224"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
VOID = {"meta", "wbr", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; gathers text, ids and what attributes refer to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.addresses: list[str] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.look_at(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.look_at(attrs)

    def look_at(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name in ("aria-labelledby", "aria-describedby"):
                self.references |= set((value or "").split())
            if name in ("href", "src"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).replace("\u00a0", " ").split())


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention made up: these runs have no models."""

    def look(group, name: str) -> Look:
        places = [i for i, arm in enumerate(group.arms) if arm.finished]
        layers = [LayerEntropy((3.0, 2.0), 4.0), LayerEntropy((1.0, 2.0), 4.0)]
        cells = {i: Cell(PIXEL, "<3>", right=i == 0) for i in places}
        picture = Picture(f"{name}-photo-0", 7, "four", PIXEL, 32, 32, cells)
        return Look(dict.fromkeys(places, layers), [picture] if places else [], ["lit_ti is not shown here."], 0, 64)

    monkeypatch.setattr(section, "look", look)


def page_of(*folders: Path) -> Page:
    html = render(collect(folders))
    assert len(html.encode()) < 2_000_000
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert page.references <= set(page.ids)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    for address in page.addresses:
        assert address.startswith("data:image/") or address[1:] in page.ids
    assert not re.search(r"url\((?!#)|@import|https?:", html)
    return page


def test_the_answer_comes_first(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed, accuracy=0.7)
        make_run(f"{BASE}+cb", seed, accuracy=0.95)
    text = page_of(tmp_path).text
    title, lead, rest = text[: (start := text.index("vitrefine ·"))], text[start : start + 300], text[start + 300 :]
    assert title.strip() == f"{BASE}, +cb on digits"
    assert "digits · recipe digits · 20 epochs · 3 seeds +cb is better than vit_tiny_patch16_224 by" in lead
    assert "Better (95 % interval +" in text
    for said in (
        "The interval of the difference excludes zero",
        "Test accuracy: +cb ends highest, at",
        "Training loss:",
        "attend",
        "epochs: 20",
        "vitrefine report",
        "CPU, 2 threads",
        "torch 2.11.0",
        "four",
    ):
        assert said in rest


def test_one_spec(make_run, tmp_path) -> None:
    make_run(BASE)
    page = page_of(tmp_path)
    assert "There is nothing here to compare it with." in page.text
    assert "difference" not in page.text.partition("How to read")[0]
    assert render(collect([tmp_path])).count('<td class="found">') == 1  # parameters are no finding


def test_the_same_in_every_seed(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed, right=[True] * 90 + [False] * 10)
        make_run(f"{BASE}+cb", seed, right=[True] * 91 + [False] * 9)
    html = render(collect([tmp_path]))
    assert "The difference is the same in every seed" in html  # and has no interval that could include zero
    assert html.count('<td class="found">') == 4


def test_the_chart_of_differences_has_room_for_long_figures(make_run, tmp_path) -> None:
    """Two seeds on many images say little, at length; a digit of a common font takes less than 7.5 of 12 pixels."""
    for seed, count in enumerate((5400, 4600)):
        make_run(BASE, seed, right=[True] * 5000 + [False] * 5000)
        make_run(f"{BASE}+cb", seed, right=[True] * count + [False] * (10000 - count))
    html = render(collect([tmp_path]))
    (width,) = re.findall(r'viewBox="0 0 ([0-9.]+) [0-9.]+"[^>]*differences-title', html)
    ((place, figure),) = re.findall(r'<text[^>]* x="([0-9.]+)"[^>]*>([^<]*…[^<]*)</text>', html)
    assert figure == "0.00 (−50.82 … +50.82)"
    assert float(place) + 7.5 * len(figure) < float(width)


def test_ten_specs(make_run, tmp_path) -> None:
    make_run(BASE)
    for i in range(9):
        make_run(f"{BASE}+refiner(expansion={i + 1})+cb_s(layers=[0,{i}])")
    page = page_of(tmp_path)
    assert "others cannot be told apart from" in page.text
    assert (
        "among 9 comparisons without any effect, the chance that at least one excludes zero is up to 45 %" in page.text
    )


def test_different_numbers_of_seeds(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed)
    make_run(f"{BASE}+cb")
    text = page_of(tmp_path).text
    assert "as a mean over 1 to 3 seeds; differences are taken seed by seed. Where there is one seed, or one in" in text


def test_one_seed_in_common(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed)
        make_run(f"{BASE}+cb", seed + 2)
    text = page_of(tmp_path).text
    assert "as a mean over 3 seeds; differences are taken seed by seed. Where there is one seed, or one in" in text
    assert "+cb: what seeds 3 and 4 gave is not in its difference, for the baseline has no such run." in text


def test_what_more_seeds_would_tell(make_run, tmp_path) -> None:
    """Differences of +2, 0 and -2 points vary by 2: t is 2.262 for nine degrees of freedom, 2.045 for 29."""

    def pair(seed: int, right: int) -> None:
        for spec, count in ((BASE, 50), (f"{BASE}+cb", right)):
            make_run(spec, seed, right=[True] * count + [False] * (100 - count))

    for seed, right in enumerate((52, 50, 48)):
        pair(seed, right)
    said = "varies by 2.0 points (standard deviation): intervals would be about ±1.4 with 10 and ±0.7 with 30 seeds."
    assert said in page_of(tmp_path).text
    for seed in range(3, 10):
        pair(seed, 50)
    assert re.search(r"intervals would be about ±0\.\d with 30 seeds\.", page_of(tmp_path).text)
    # One seed, so that its interval is over images, which are many.
    make_run(f"{BASE}+se", right=[True] * 50 + [False] * 50)
    assert re.search(r"intervals would be about ±0\.\d with 30 seeds\.", page_of(tmp_path).text)


def test_seeds_count_by_what_they_tell_of_how_differences_vary(make_run, tmp_path) -> None:
    """Differences of ±2 in two seeds have a variance of 8, of 1, 0, -1 in three one of 1: (8 + 2 · 1) / 3 = 1.83²."""
    for seed, (two, three) in enumerate(((52, 51), (48, 50), (None, 49))):
        for spec, count in ((BASE, 50), (f"{BASE}+cb", two), (f"{BASE}+se", three)):
            if count is not None:
                make_run(spec, seed, right=[True] * count + [False] * (100 - count))
    assert "varies by 1.8 points (standard deviation)" in page_of(tmp_path).text


def test_more_seeds_are_not_spoken_of_where_these_tell(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed, accuracy=0.7)
        make_run(f"{BASE}+cb", seed, accuracy=0.95)
    assert "From seed to seed" not in page_of(tmp_path).text


def test_a_damaged_evaluation_does_not_cost_the_page(make_run, tmp_path) -> None:
    folder = make_run(BASE)
    (folder / "evaluation.json").write_text('[{"data": "digits", "accuracy": "x"}]')
    text = page_of(tmp_path).text
    assert f"{folder / 'evaluation.json'} is damaged, so that nothing is shown of it; delete it" in text


def test_a_damaged_run_does_not_cost_the_page(make_run, tmp_path) -> None:
    make_run(BASE)
    damaged = make_run(f"{BASE}+cb", name="<b>")
    (damaged / "run.json").write_text("{}")
    text = page_of(tmp_path).text
    told = f"{damaged / 'run.json'} is damaged: it has no spec; move this run elsewhere, or train it again."
    assert f"One run is damaged, and left out. {told}" in text


def test_evaluations_of_two_specs_have_a_legend(make_run, tmp_path) -> None:
    half = {"value": 70.0, "count": 5}
    sweep = [{"ratio": ratio, "chosen_on": half, "tested_on": half} for ratio in (1, 2)]
    for spec in (BASE, f"{BASE}+cb"):
        (make_run(spec, epochs=1) / "evaluation.json").write_text(
            json.dumps([{"data": "digits", "images": 10, "rfc": {"best": 1.0, "sweep": sweep}}])
        )
    html = render(collect([tmp_path]))
    tested = html[html.index("Tested further") : html.index("Accuracy at other crop ratios")]
    assert 'class="legend"' in tested
    assert '<table class="figures">' in tested  # whose first column stays in sight on a phone


def test_runs_that_failed(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb", status="failed", error="the loss is NaN at step 7")
    text = page_of(tmp_path).text
    assert "1 of 2 runs has not finished; the figures are from the other 1." in text
    assert "+cb, seed 0: failed: the loss is NaN at step 7." in text
    assert "Nothing can be said of +cb." in text


def test_nothing_finished(make_run, tmp_path) -> None:
    make_run(BASE, status="stopped", epochs=1)
    text = page_of(tmp_path).text
    assert f"No run of {BASE} has finished." in text
    assert "No run has finished yet, so there are no accuracies." in text


def test_names_are_text(make_run, tmp_path) -> None:
    evil = 'hf:"</style><script>alert(1)</script> $\\frac{1}{0}$ & \' id=\\"a\\""'
    for seed in range(2):
        make_run(evil, seed)
        make_run(f"{evil}+<img src=x onerror=alert(1)>", seed)
    page = page_of(tmp_path)  # which refuses scripts, images and handlers
    assert "<script>alert(1)</script>" in page.text
    assert "+<img src=x onerror=alert(1)>" in page.text


def test_groups_are_shown_apart(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb")
    make_run(f"{BASE}+cb", recipe="epochs: 20\nbatch: 64\noptim: {lr: 0.01}\n", started="2026-04-01")
    text = page_of(tmp_path).text
    assert "2 groups of runs, with different recipes. What was trained or tested differently is shown, but not" in text
    assert "optim.lr=0.01" in text


def test_groups_on_images_that_changed_are_told_apart(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(BASE, fingerprint="cafe", started="2026-04-01")
    assert "digits · recipe digits · 20 epochs · 1 seed · fingerprint=cafe" in page_of(tmp_path).text


def test_memory_that_was_not_measured(make_run, tmp_path) -> None:
    make_run(BASE, memory=None)
    assert "Memory was not measured." in page_of(tmp_path).text


def test_the_command_of_the_comparison_is_there(make_run, tmp_path) -> None:
    folder = make_run(BASE)
    recipe = (folder / "recipe.yaml").read_text()
    write_plan(tmp_path, Plan((BASE, f"{BASE}+cb"), 1, "digits", "digits", recipe, "vitrefine compare x +cb --seeds 1"))
    text = page_of(tmp_path).text
    assert "Train and compare: vitrefine compare x +cb --seeds 1" in text
    assert "+cb, seed 0: has not begun." in text


def test_the_command_of_a_comparison_from_other_weights_is_not(make_run, tmp_path) -> None:
    recipe = (make_run(BASE) / "recipe.yaml").read_text()
    plan = Plan((BASE,), 1, "digits", "digits", recipe, "vitrefine compare x --weights pretrained", "pretrained")
    write_plan(tmp_path, plan)
    assert "Train and compare: vitrefine compare x --weights pretrained" not in page_of(tmp_path).text


def test_of_specs_that_attend_alike_none_is_picked_out(make_run, tmp_path) -> None:
    for spec in (BASE, f"{BASE}+cb", "lit_ti"):
        make_run(spec)
    (group,) = collect([tmp_path]).groups
    layers = [LayerEntropy((share,), 100.0) for share in (99.6, 99.9, 80.0)]
    chart = entropies("entropy", group, {index: [layer] for index, layer in enumerate(layers)})
    assert chart
    assert chart.title.replace("\u00a0", " ").startswith(f"{BASE} and +cb attend most evenly, with 100 % of")


def test_logs_without_an_epoch_in_common(make_run, tmp_path) -> None:
    for seed, kept in ((0, slice(0, 10)), (1, slice(10, None))):
        path = make_run(BASE, seed) / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[kept]))
    page_of(tmp_path)


def test_a_long_training(make_run, tmp_path) -> None:
    for seed in range(3):
        for spec in (BASE, f"{BASE}+cb", "lit_ti"):
            make_run(spec, seed, epochs=1000)
    page_of(tmp_path)


def test_written_whole(make_run, tmp_path) -> None:
    make_run(BASE)
    write_page(collect([tmp_path]), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().rstrip().endswith("</html>")
