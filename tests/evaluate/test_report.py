"""The section of the page that shows evaluations of runs."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

import vitrefine
from vitrefine.evaluate.evaluation import FILE
from vitrefine.evaluate.subject import fingerprint
from vitrefine.report.charts import THIRD
from vitrefine.report.collect import collect
from vitrefine.report.evaluation import evaluations
from vitrefine.report.page import _environment
from vitrefine.report.section import section

BASE = "vit_tiny_patch16_224"


def write_run(folder: Path, spec: str, seed: int = 0) -> Path:
    """A run as training leaves it; the writer belongs to the report's own tests."""
    path = Path(__file__).parents[1] / "report" / "conftest.py"
    found = importlib.util.spec_from_file_location("report_conftest", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.write_run(folder, spec, seed)


def estimate(value: float, over: str = "images", count: int = 100) -> dict:
    return {"value": value, "low": value - 2, "high": value + 2, "over": over, "count": count}


def evaluation(top1: float, **changes) -> dict:
    bins = [
        {"low": 0.0, "high": 50.0, "images": 40, "confidence": 30.0, "accuracy": 20.0},
        {"low": 50.0, "high": 100.0, "images": 60, "confidence": 80.0, "accuracy": 90.0},
    ]
    points = [
        {"ratio": ratio, "chosen_on": estimate(top1 + ratio, count=50), "tested_on": estimate(top1, count=50)}
        for ratio in (0.9, 1.0, 1.2)
    ]
    shot = {"name": "shot-noise", "label": "shot noise <60>", "accuracy": estimate(top1 - 9, "seeds", 5)}
    found = {
        "data": "digits",
        "fingerprint": "f00d",
        "images": 100,
        "settings": {"size": [32, 32], "crop_ratio": 1.0, "mean": [0.5], "std": [0.5]},
        "accuracy": {"top1": estimate(top1), "top5": None, "ece": 7.25, "loss": 0.5, "reliability": bins},
        "robustness": [shot],
        "rfc": {"usual": 1.0, "best": 1.2, "gain": estimate(1.5, count=50), "sweep": points},
        "speed": {"device": "GPU", "batch": 64, "images_per_s": 1234.5, "latency_ms": {"p50": 1.5}, "memory_mib": 99.0},
    }
    return found | changes


@pytest.fixture
def runs(tmp_path):
    """Two specs, the second with two seeds; all evaluated, with means of their own."""
    for i, (spec, seed, top1) in enumerate([(BASE, 0, 80.0), (f"{BASE}+cb", 0, 82.0), (f"{BASE}+cb", 1, 84.0)]):
        folder = write_run(tmp_path / str(i), spec, seed)
        own = {"size": [32, 32], "crop_ratio": 1.0, "mean": [0.1 * i], "std": [0.5]}
        (folder / FILE).write_text(json.dumps([evaluation(top1, settings=own)]))
    return tmp_path


def shown(folder: Path):
    (group,) = collect([folder]).groups
    return evaluations("part", group)


def test_figures(runs):
    found = shown(runs)
    (sitting,) = found["sittings"]
    assert sitting.title == "100 images of digits, 32×32 pixels, crop ratio 1"
    rows = {label: cells for label, _, cells in sitting.rows}
    assert rows["top-1"][0] == ("80.0", "78.0 … 82.0", "")
    assert rows["top-1"][1] == ("83.0", "±12.7", "")  # t with one degree of freedom: 12.706 · √2/√2
    assert rows["shot noise <60>"][0] == ("71.0", "±2.0", "")
    assert rows["its gain"][0] == ("+1.5", "−0.5 … +3.5", "")
    assert rows["images/s in inference, 64 at once on GPU"][0] == ("1,234", "", "")
    assert rows["latency of one image on GPU"][0] == ("1.50", "", "")
    assert rows["peak memory, 64 at once on GPU"][0] == ("99", "", "")
    assert "top-5" not in rows
    assert [chart.name for chart in sitting.charts] == ["part-0-rfc", "part-0-reliability"]
    assert "83.6" in sitting.charts[0].description  # (83 + 1.2 + 83)/2
    assert "30 20 and 80 90" in sitting.charts[1].description


def test_differences_are_paired_by_seed(runs):
    """+2 and +3 points: 2.5 ± 12.706 · 0.5."""
    folder = write_run(runs / "3", BASE, 1)
    (folder / FILE).write_text(json.dumps([evaluation(81.0)]))
    (sitting,) = shown(runs)["sittings"]
    rows = {label: cells for label, _, cells in sitting.rows}
    assert rows["top-1"][0][2] == ""
    assert rows["top-1"][1][2] == "+2.5 (−3.9 … +8.9)"
    assert rows["images/s in inference, 64 at once on GPU"][1][2] == "0"  # no interval out of values that do not vary


def test_speeds_have_no_decimals_but_small_ones(runs):
    """1,000 and 2,000: 1,500 ± 12.706 · 500."""
    for run, speed in (("0", 4.25), ("1", 1000.0), ("2", 2000.0)):
        made = {"device": "GPU", "batch": 64, "images_per_s": speed}
        (runs / run / FILE).write_text(json.dumps([evaluation(80.0, speed=made)]))
    (sitting,) = shown(runs)["sittings"]
    rows = {label: cells for label, _, cells in sitting.rows}
    assert rows["images/s in inference, 64 at once on GPU"] == [("4.2", "", ""), ("1,500", "±6,353", "")]


def test_letters_in_charts_are_as_large_as_in_others(runs):
    """They share a row of three, into which a wider drawing would be shrunk."""
    (sitting,) = shown(runs)["sittings"]
    widths = [float(re.search(r'viewBox="0 0 ([0-9.]+)', chart.svg)[1]) for chart in sitting.charts]
    assert widths == [THIRD, THIRD]


def test_what_differs_is_not_set_side_by_side(runs):
    (runs / "0" / FILE).write_text(json.dumps([evaluation(80.0, images=50)]))
    found = shown(runs)
    assert [sitting.columns for sitting in found["sittings"]] == [[0], [1]]


def test_speeds_of_other_devices_are_other_rows(runs):
    slow = {"device": "CPU", "batch": 8, "images_per_s": 9.0, "latency_ms": {"p50": 99.0}, "memory_mib": 999.0}
    (runs / "0" / FILE).write_text(json.dumps([evaluation(80.0, speed=slow)]))
    (sitting,) = shown(runs)["sittings"]
    rows = {label: [cell[0] for cell in cells] for label, _, cells in sitting.rows}
    assert rows["images/s in inference, 8 at once on CPU"] == ["9.0", "–"]
    assert rows["images/s in inference, 64 at once on GPU"] == ["–", "1,234"]
    assert rows["latency of one image on CPU"] == ["99.00", "–"]


def test_evaluations_of_former_weights_are_not_shown(runs):
    """A run that was trained and evaluated again: what was tested before, in other ways, is of no model any more."""
    former = evaluation(10.0, images=50, weights="old")
    (runs / "0" / FILE).write_text(json.dumps([former, evaluation(80.0, weights="new")]))
    (sitting,) = shown(runs)["sittings"]
    assert sitting.title.startswith("100 images")


def test_a_model_written_later_makes_an_evaluation_stale(runs):
    model = runs / "1" / "model.safetensors"
    model.write_bytes(b"")
    os.utime(model, (2e9, 2e9))
    found = shown(runs)
    assert "older than the models there" in found["notes"][0]
    assert str(runs / "1") in found["notes"][0]


def test_a_copied_run_keeps_its_evaluation(runs):
    """Copying gives files new times, in any order; it is the weights that tell."""
    model = vitrefine.create(f"{BASE}(depth=1,embed_dim=12,img_size=32,num_heads=1)")
    vitrefine.save(model, runs / "0" / "model.safetensors")
    os.utime(runs / "0" / "model.safetensors", (2e9, 2e9))
    (runs / "0" / FILE).write_text(json.dumps([evaluation(80.0, weights=fingerprint(model))]))
    assert shown(runs)["notes"] == []
    model.head.bias.data += 1
    vitrefine.save(model, runs / "0" / "model.safetensors")
    os.utime(runs / "0" / "model.safetensors", (2e9, 2e9))
    assert "older than the models there" in shown(runs)["notes"][0]


def test_runs_without_evaluations(runs):
    for path in runs.glob(f"*/{FILE}"):
        path.unlink()
    assert shown(runs) is None


def test_damaged_and_partial_files(runs):
    (runs / "0" / FILE).write_text("{")
    (runs / "1" / FILE).write_text(json.dumps([{"data": "digits"}, 7]))
    found = shown(runs)
    assert len(found["sittings"]) == 2
    assert found["sittings"][0].rows == []
    assert found["notes"] == [
        f"{runs / '0' / FILE} is damaged, so that nothing is shown of it; delete it, and run vitrefine evaluate again."
    ]


def test_in_the_page(runs):
    """As `group.html.j2` includes it: escaped, with swatches of the specs, and charts."""
    collection = collect([runs])
    (group,) = collection.groups
    content = section("part", group, collection)
    environment = _environment(arm.label for arm in group.arms)
    page = environment.get_template("group.html.j2").render(group=content, groups=[content])
    assert "Tested further" in page
    assert "shot noise &lt;60&gt;" in page
    assert 'id="part-evaluation-0-rfc-title"' in page
    assert page.count("<section>") == page.count("</section>")
