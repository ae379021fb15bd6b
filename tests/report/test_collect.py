"""Runs in groups, in order, each once."""

import pytest

from vitrefine.errors import UserError
from vitrefine.report.collect import collect
from vitrefine.report.page import render
from vitrefine.report.plan import Plan, write_plan
from vitrefine.report.problems import problems

from .conftest import RECIPE

BASE = "vit_tiny_patch16_224"


def labels(*folders) -> list[list[str]]:
    return [[arm.label for arm in group.arms] for group in collect(folders).groups]


def test_first_to_begin_is_the_baseline(make_run, tmp_path) -> None:
    make_run(f"{BASE}+cb", started="2026-01-02T00:00:00")
    make_run(BASE, started="2026-01-01T00:00:00")
    make_run("lit_ti", started="2026-01-03T00:00:00")
    assert labels(tmp_path) == [[BASE, "+cb", "lit_ti"]]


def test_first_folder_goes_before_time(make_run) -> None:
    late = make_run("lit_ti", started="2026-01-03T00:00:00")
    early = make_run(BASE, started="2026-01-01T00:00:00")
    assert labels(late, early) == [["lit_ti", BASE]]
    assert labels(late, early, late, late.parent) == [["lit_ti", BASE]]


def test_first_folder_goes_before_a_comparison(make_run, tmp_path) -> None:
    first = make_run("lit_ti")
    make_run(f"{BASE}+cb", started="2026-01-01T00:00:00")
    make_run(BASE, started="2026-01-02T00:00:00")
    write_plan(tmp_path, Plan((BASE, f"{BASE}+cb"), 1, "digits", "digits", RECIPE, "vitrefine compare"))
    assert labels(tmp_path) == [[BASE, "+cb", "lit_ti"]]
    assert labels(first, tmp_path) == [["lit_ti", BASE, f"{BASE}+cb"]]


def test_other_data_and_other_recipes_are_other_groups(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb", fingerprint="beef")
    make_run(f"{BASE}+cb", recipe="epochs: 20\nbatch: 64\noptim: {lr: 0.01}\ndata: {workers: 0}\n")
    assert labels(tmp_path) == [[BASE], [f"{BASE}+cb"], [f"{BASE}+cb"]]


def test_settings_that_change_nothing_keep_runs_together(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb", recipe="log_every: 7\nepochs: 20\nbatch: 64\ndata: {workers: 3}\noptim: {lr: 0.001}\n")
    assert labels(tmp_path) == [[BASE, "+cb"]]


def test_of_two_runs_with_one_seed_the_later_counts(make_run, tmp_path) -> None:
    make_run(BASE, accuracy=0.1, started="2026-01-01T00:00:00")
    late = make_run(BASE, accuracy=0.9, started="2026-01-02T00:00:00")
    make_run(BASE, status="failed", error="no", started="2026-01-03T00:00:00")
    (group,) = collect([tmp_path]).groups
    assert [run.folder for run in group.baseline.finished.values()] == [late]
    assert len(group.baseline.replaced) == 1
    assert group.baseline.unfinished == []


def test_planned_runs_that_never_began(make_run, tmp_path) -> None:
    make_run(f"{BASE}+cb", started="2026-01-01T00:00:00")
    plan = Plan((BASE, f"{BASE}+cb"), 2, "digits", "digits", RECIPE, "vitrefine compare")
    write_plan(tmp_path, plan)
    (group,) = collect([tmp_path], {(BASE, 1): "no room"}).groups
    assert [arm.label for arm in group.arms] == [BASE, "+cb"]
    assert [(run.seed, run.status, run.error) for run in group.baseline.runs] == [
        (0, "missing", ""),
        (1, "failed", "no room"),
    ]


def test_a_comparison_of_which_nothing_began(tmp_path) -> None:
    """Why is told; without a reason there is nothing to tell."""
    write_plan(tmp_path, Plan((BASE, f"{BASE}+cb"), 1, "digits", "digits", RECIPE, "vitrefine compare"))
    found = collect([tmp_path], {(BASE, 0): "no room", (f"{BASE}+cb", 0): "no room"})
    (group,) = found.groups
    assert problems(group) == [f"{BASE}, seed 0: failed: no room.", "+cb, seed 0: failed: no room."]
    page = render(found)
    assert "No run has finished." in page
    assert "fingerprint" not in page
    with pytest.raises(UserError, match="there is no run in"):
        collect([tmp_path])


def test_bad_folders(make_run, tmp_path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no run in"):
        collect([tmp_path / "empty"])
    (tmp_path / "empty" / "compare.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"compare.json is damaged: it has no specs; choose another folder, or delete it"
    ):
        collect([tmp_path / "empty"])


DAMAGES = {
    "run.json": ["", "[]", '{"spec": "a', "{}"],
    "result.json": ["{", '{"top1": "x"}'],
    "recipe.yaml": ["epochs: [1"],
}


@pytest.mark.parametrize(("file", "content"), [(file, each) for file, found in DAMAGES.items() for each in found])
def test_a_damaged_run_is_left_out(make_run, tmp_path, file: str, content: str) -> None:
    whole, damaged = make_run(BASE), make_run(f"{BASE}+cb")
    (damaged / file).write_text(content)
    for folders in ([tmp_path], [tmp_path, tmp_path], [whole, tmp_path]):
        found = collect(folders)
        assert [run.folder for group in found.groups for run in group.runs] == [whole]
        (sentence,) = found.left_out
        assert sentence.startswith(f"{damaged / file} ")
    for folders in ([damaged], [whole, damaged]):  # which is named itself
        with pytest.raises(UserError, match=f"^{damaged / file} "):
            collect(folders)
    (whole / file).write_text(content)
    with pytest.raises(UserError, match=f"^no run in {tmp_path} can be read: {whole / file} "):
        collect([tmp_path])


def test_a_planned_run_that_is_damaged_has_begun(make_run, tmp_path) -> None:
    """And what it was to be compared with stays the baseline."""
    plan = Plan((BASE, f"{BASE}+cb"), 1, "digits", "digits", RECIPE, "vitrefine compare")
    write_plan(tmp_path, plan)
    make_run(f"{BASE}+cb")
    damaged = make_run(BASE).rename(tmp_path / plan.folder(BASE, 0))
    (damaged / "run.json").write_text("{")
    (group,) = collect([tmp_path]).groups
    assert [(arm.label, [run.status for run in arm.runs]) for arm in group.arms] == [
        (BASE, ["damaged"]),
        ("+cb", ["finished"]),
    ]
    assert problems(group)[0] == f"{BASE}, seed 0: is damaged."
