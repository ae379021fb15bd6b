"""The committed matrix is what a new measurement gives, it is complete, and the command shows it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

from vitrefine.surgery import census
from vitrefine.surgery.registry import names
from vitrefine.surgery.zoo import CB_GOAL, PAGE, REFINER_GOAL, Outcome, Row, Zoo, footnotes, load, markdown

ZOO = load()
ATTENDING = [row for row in ZOO.rows if row.attention != "none"]
same_timm = pytest.mark.skipif(
    timm.__version__ != ZOO.versions["timm"], reason=f"the zoo was measured with timm {ZOO.versions['timm']}"
)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitrefine.cli", "zoo", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@same_timm
def test_every_family_is_there() -> None:
    assert {row.family for row in ZOO.rows} == set(census.families())
    assert len({row.family for row in ZOO.rows if row.smallest}) == sum(row.smallest for row in ZOO.rows)


@same_timm
@pytest.mark.parametrize("family", ["pit", "tiny_vit", "visformer", "convmixer"])
def test_members_are_the_smallest(family: str) -> None:
    (row,) = [row for row in ZOO.rows if row.family == family and row.smallest]
    sizes = census.members(family)
    assert next(iter(sizes)) == row.model
    assert sizes[row.model] == row.parameters


@same_timm
@pytest.mark.full
@pytest.mark.parametrize("family", sorted({row.family for row in ZOO.rows}))
def test_all_members_are_the_smallest(family: str) -> None:
    test_members_are_the_smallest(family)


def test_every_modification_was_tried() -> None:
    for row in ATTENDING:
        assert list(row.outcomes) == names()
        assert not row.excluded


def test_broadcasting_reaches_the_families_that_attend_or_mix() -> None:
    works, asked = ZOO.share("cb", ("softmax", "other"))
    assert asked > 50
    assert works / asked >= CB_GOAL


def test_refining_reaches_the_families_with_softmax_attention() -> None:
    works, asked = ZOO.share("refiner", ("softmax",))
    assert asked > 45
    assert works / asked >= REFINER_GOAL


def test_promised_starts_are_equal() -> None:
    for row in ATTENDING:
        for name, outcome in row.outcomes.items():
            if outcome.difference is not None:
                assert outcome.difference < 1e-5, (row.model, name)


def test_what_works_changes_something_and_what_does_not_says_why() -> None:
    for row in ATTENDING:
        for name, outcome in row.outcomes.items():
            assert bool(outcome.changes) == outcome.works, (row.model, name)
            if not outcome.works:
                assert re.match(r"\S+ \S+ \S+", outcome.reason)
                assert "\n" not in outcome.reason


@pytest.mark.parametrize("family", ["convnext", "resnet", "efficientnet", "focalnet", "repvit"])
def test_convolutional_networks_are_excluded_with_a_sentence(family: str) -> None:
    (row,) = [row for row in ZOO.rows if row.family == family and row.smallest]
    assert "convolution or pooling only" in row.excluded


@same_timm
@pytest.mark.parametrize("model", ["test_vit", "mobilevit_xxs", "test_convnext"])
def test_a_sample_measures_as_committed(model: str) -> None:
    _measures_as_committed(model)


@same_timm
@pytest.mark.full
@pytest.mark.parametrize("model", [row.model for row in ZOO.rows])
def test_everything_measures_as_committed(model: str) -> None:
    _measures_as_committed(model)


def _measures_as_committed(model: str) -> None:
    (committed,) = [row for row in ZOO.rows if row.model == model]
    measured = census.measure(model, smallest=committed.smallest)
    for name, outcome in measured.outcomes.items():
        assert outcome.difference is None or outcome.difference < 1e-5, name
    assert _without_differences(measured) == _without_differences(committed)


def _without_differences(row: Row) -> Row:
    """Rounding differs from machine to machine."""
    outcomes = {name: dataclasses.replace(outcome, difference=None) for name, outcome in row.outcomes.items()}
    return dataclasses.replace(row, outcomes=outcomes)


def test_weights_are_nowhere_left_at_zero() -> None:
    model = census.create("test_vit")
    assert all(p.abs().min() > 0 for p in model.parameters())
    again = census.create("test_vit")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_the_matrix_makes_a_round_trip() -> None:
    assert Zoo.from_json(ZOO.to_json()) == ZOO


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / PAGE
    if not page.exists():
        pytest.skip("not in a checkout")
    assert page.read_text(encoding="utf-8") == markdown(ZOO)


def test_footnotes_are_numbered_in_order_and_once() -> None:
    no, other = Outcome(reason="because"), Outcome(reason="for another reason")
    rows = tuple(
        Row("family", name, 1, "softmax", outcomes={"cb": cb, "refiner": refiner})
        for name, cb, refiner in (("a", Outcome(changes=1), no), ("b", other, no))
    )
    assert footnotes(rows) == {"because": 1, "for another reason": 2}


def test_command_prints_the_matrix_in_eighty_columns() -> None:
    result = run()
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("pit ")]
    (row,) = [row for row in ZOO.rows if row.family == "pit"]
    assert line.split()[1:] == [str(o.changes) if o.works else "–" for o in row.outcomes.values()]


def test_command_gives_the_reasons_of_a_family() -> None:
    result = run("xcit", "mlp_mixer")
    assert result.returncode == 0
    assert "xcit as xcit_nano_12_p8_224" in result.stdout
    assert "has no attention" in " ".join(result.stdout.split())
    assert "resnet" not in result.stdout


def test_command_explains_exclusions() -> None:
    assert "convolution or pooling only" in " ".join(run("convnext").stdout.split())


def test_command_in_json() -> None:
    rows = json.loads(run("--json").stdout)
    assert len(rows) == len(ZOO.rows)
    assert json.loads(run("vision_transformer", "--json").stdout)[0]["outcomes"]["cb"]["changes"] > 0


def test_command_measures_any_model() -> None:
    (row,) = json.loads(run("test_vit2", "--measure", "--json").stdout)
    assert row["family"] == "vision_transformer"
    assert row["outcomes"]["refiner"]["changes"] == 8


@pytest.mark.parametrize("args", [["swin_transfomer"], ["swin_transfomer", "--measure"]])
def test_command_knows_what_was_meant(args: list[str]) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert "did you mean swin_transformer?" in result.stderr
    assert "Traceback" not in result.stderr


def test_command_completes_the_beginning_of_a_name() -> None:
    sentence = "no family or model 'swin'; did you mean swin_tiny_patch4_window7_224 or swin_transformer or "
    assert sentence in run("swin").stderr


def test_command_needs_no_torch_for_what_is_committed() -> None:
    code = "import sys; sys.argv = ['vitrefine']; from vitrefine.surgery import zoo; zoo.load()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
