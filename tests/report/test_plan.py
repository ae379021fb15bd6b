"""Specs of a command line, and folders that may or may not be used."""

import dataclasses

import pytest

from vitrefine.errors import UserError
from vitrefine.report.plan import Plan, check_folder, read_plan, read_specs, write_plan

PLAN = Plan(("a", "a+cb", "a+cb(layers=all)", "lit_ti"), 3, "digits", "digits", "epochs: 1\n", "vitrefine compare a")


def test_a_leading_plus_continues_the_first() -> None:
    base = "vit_tiny_patch16_224"
    assert read_specs([f"{base} ( depth = 2 )", "+cb", "lit_ti", "+refiner(expansion=3)+cb_s"]) == (
        f"{base}(depth=2)",
        f"{base}(depth=2)+cb",
        "lit_ti",
        f"{base}(depth=2)+refiner+cb_s",
    )


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["+cb", "lit_ti"], "the first spec, \\+cb, has no model to continue"),
        (["lit_ti", "+cb", "lit_ti+cb"], "lit_ti\\+cb is the same as \\+cb"),
        (["lit_ti", "+cbb"], "did you mean cb"),
        (["lit_ti", "+cb(layers="], "layers"),
    ],
)
def test_bad_specs(texts: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_specs(texts)


def test_folders_of_runs_are_readable_and_all_different() -> None:
    names = [PLAN.folder(spec, seed) for seed, spec in PLAN.runs()]
    assert names[:2] == ["a-s0", "cb-s0"]
    assert names[2].startswith("cb-")
    assert len(set(names)) == 12


def test_seed_by_seed() -> None:
    assert [seed for seed, _ in PLAN.runs()] == [0] * 4 + [1] * 4 + [2] * 4


def test_round_trip(tmp_path) -> None:
    assert read_plan(tmp_path) is None
    write_plan(tmp_path, PLAN)
    assert read_plan(tmp_path) == PLAN


def test_folders_that_are_refused(tmp_path) -> None:
    check_folder(tmp_path / "new", PLAN, resume=False)
    check_folder(tmp_path, PLAN, resume=True)
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="something else than a comparison"):
        check_folder(tmp_path, PLAN, resume=True)
    write_plan(tmp_path, PLAN)
    check_folder(tmp_path, dataclasses.replace(PLAN, seeds=5, specs=("a", "b")), resume=True)
    # What a run that is out of memory is told to set.
    check_folder(tmp_path, dataclasses.replace(PLAN, recipe=f"{PLAN.recipe}accumulate: 2\n"), resume=True)
    with pytest.raises(UserError, match="go on with it with --resume"):
        check_folder(tmp_path, PLAN, resume=False)
    for change in ({"data": "cifar10:x"}, {"recipe": "epochs: 2\n"}, {"specs": ("b",)}):
        with pytest.raises(UserError, match="holds another comparison: its"):
            check_folder(tmp_path, dataclasses.replace(PLAN, **change), resume=True)
