"""Runs in groups, in order, each once."""

import json

import pytest

from vitrefine.errors import UserError
from vitrefine.report.collect import collect
from vitrefine.report.plan import Plan, write_plan

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
    plan = Plan((BASE, f"{BASE}+cb"), 2, "digits", "digits", "", "vitrefine compare")
    write_plan(tmp_path, plan)
    (group,) = collect([tmp_path], {(BASE, 1): "no room"}).groups
    assert [arm.label for arm in group.arms] == [BASE, "+cb"]
    assert [(run.seed, run.status, run.error) for run in group.baseline.runs] == [
        (0, "missing", ""),
        (1, "failed", "no room"),
    ]


def test_bad_folders(make_run, tmp_path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no run in"):
        collect([tmp_path / "empty"])
    folder = make_run(BASE)
    result = json.loads((folder / "result.json").read_text())
    for damage in ("zz", result["correct"][:-2]):
        (folder / "result.json").write_text(json.dumps(result | {"correct": damage}))
        with pytest.raises(UserError, match=r"result.json is damaged: its \"correct\" does not hold 360 images"):
            collect([tmp_path])
    (tmp_path / "empty" / "compare.json").write_text("{}")
    with pytest.raises(UserError, match=r"compare.json cannot be read"):
        collect([tmp_path / "empty"])


@pytest.mark.parametrize("damage", [None, "epochs: [1", "just words", "\0"])
def test_a_recipe_that_cannot_be_read(make_run, damage: str | None) -> None:
    folder = make_run(BASE)
    (folder / "recipe.yaml").unlink()
    if damage is not None:
        (folder / "recipe.yaml").write_text(damage)
    with pytest.raises(UserError, match=r"recipe.yaml cannot be read"):
        collect([folder])


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ("run.json", {"seed": "x"}),
        ("run.json", {"params": "many"}),
        ("run.json", {"versions": ["x"]}),
        ("result.json", {"top1": "x"}),
        ("result.json", {"images_per_s": None}),
    ],
)
def test_values_of_another_kind(make_run, file: str, wrong: dict[str, object]) -> None:
    folder = make_run(BASE)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | wrong))
    with pytest.raises(UserError, match=rf"{folder} holds a damaged run \({file}: .*\); leave it out"):
        collect([folder])
