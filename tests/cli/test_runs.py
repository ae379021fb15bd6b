"""The list of runs: readable in eighty columns, and not silenced by one that is damaged."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from vitrefine.cli.runs import runs
from vitrefine.train.job import Result

SPEC = "vit_tiny_patch16_224(depth=2)+refiner(expansion=2,kernel_size=1)"


def write_run(folder: Path, **about: object) -> None:
    folder.mkdir(parents=True)
    known = {"spec": SPEC, "base_spec": SPEC, "data": "digits", "fingerprint": "f00d", "recipe": "digits", "seed": 0}
    (folder / "run.json").write_text(json.dumps({**known, "params": 5_400_000, "status": "stopped", **about}))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "epoch", "epoch": 1, "top1": 41.5, "test_loss": 1.0}))


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_names_are_whole(
    tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/compare-vit_tiny_patch16_224-digits-12c5fb/refiner-9f1c2a-s0"))
    write_run(Path("runs/vit_tiny_patch16_224-cifar100-s0"), data="cifar100:data", error="the loss is no number")
    runs()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "runs/compare-vit_tiny_patch16_224-digits-12c5fb on digits\n" in shown
    first_column = "".join(re.split(r"  +", line)[0].strip() for line in shown.splitlines())
    for whole in ("refiner-9f1c2a-s0", "vit_tiny_patch16_224-cifar100-s0", SPEC, "the loss is no number"):
        assert whole in first_column
    assert "5.40 M" in shown
    assert "41.50" in shown


@pytest.mark.parametrize("file", ["run.json", "result.json"])
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"top1": "x", "spec": 3}'])
def test_one_that_is_damaged(tmp_path: Path, file: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "whole")
    write_run(tmp_path / "broken")
    (tmp_path / "broken" / file).write_text(content)
    runs(tmp_path, as_json=True)
    broken, whole = json.loads(capsys.readouterr().out)
    assert (broken["status"], whole["status"]) == ("damaged", "stopped")
    assert broken["error"].startswith(f"{tmp_path / 'broken' / file} is damaged: ")
    runs(tmp_path)
    assert "damaged" in capsys.readouterr().out


def test_a_log_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('\n{"kind": "epoch", "epoch": 2, "top1": "x"}\n')
    runs(tmp_path, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["epochs_done"], row["top1"], row["params"]) == (1, 41.5, 5_400_000)


def test_speed_is_that_of_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = dataclasses.asdict(Result(41.5, 90.0, 1.0, 8, 1234.0, 512.0, 9.0, 1, 5_400_000, 360_000_000, "ff"))
    for name, at_once in (("alone", 1), ("together", 3)):
        write_run(tmp_path / name, status="finished", at_once=at_once)
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    runs(tmp_path)
    assert capsys.readouterr().out.count("1,234") == 1
