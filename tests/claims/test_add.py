"""From run folders to raw results."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vitrefine.claims.add import add_runs
from vitrefine.claims.raw import read_raw, read_raws
from vitrefine.errors import UserError

VIT = "vit_tiny_patch16_224"
Make = Callable[..., Path]


def test_one_file_a_spec(runs: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    written = add_runs([runs], docs)
    assert [path.name.rpartition("-")[0] for path in sorted(written)] == [
        f"{VIT}-cb-cifar100-cifar",
        f"{VIT}-cifar100-cifar",
    ]
    raw = next(raw for raw in read_raws(docs).values() if raw.base_spec == f"{VIT}+cb")
    assert raw.values("accuracy") == {0: 71.0, 1: 71.6, 2: 71.2}
    assert raw.values("train_loss") == {0: 1.5, 1: 1.5, 2: 1.5}
    assert (raw.data, raw.fingerprint, raw.recipe, raw.test_images) == ("cifar100", "f00d", "cifar", 1000)
    assert raw.settings == {"epochs": "20", "batch": "64", "optim.lr": "0.001"}  # log_every decides nothing
    run = raw.runs[0]
    assert (run.status, run.seconds, run.hardware) == ("finished", 120.0, "NVIDIA H200")
    assert (run.at_once, run.versions["torch"]) == (1, "2.11.0")
    assert sum(int(digit, 16).bit_count() for digit in run.correct) == 710


def test_commands_are_of_no_machine(runs: Path, tmp_path: Path) -> None:
    for path in add_runs([runs], tmp_path / "docs"):
        assert str(tmp_path) not in path.read_text()
        assert "/home" not in path.read_text()
    raw = next(raw for raw in read_raws(tmp_path / "docs").values() if raw.base_spec == f"{VIT}+cb")
    folder = f"runs/{VIT}-cb-s$seed"
    train = f"vitrefine train {VIT}+cb --data cifar100:PATH --recipe cifar --set batch=64 --seed $seed --out {folder}"
    assert raw.commands == [train]
    assert raw.rerun == f"for seed in 0 1 2; do {train}; done"


def test_specs_are_canonical(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "a", f"{VIT}+refiner(kernel_size=1, expansion=3)", 0, 700)
    make_run(tmp_path / "b", f"{VIT}+refiner(kernel_size=1)", 1, 710)
    (path,) = add_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "docs")
    assert read_raw(path).base_spec == f"{VIT}+refiner(kernel_size=1)"
    assert read_raw(path).values("accuracy") == {0: 70.0, 1: 71.0}


def test_what_may_not_be_averaged_is_kept_apart(make_run: Make, tmp_path: Path) -> None:
    others = [{}, {"fingerprint": "beef"}, {"weights": "/home/somebody/deit.safetensors"}]
    folders = [make_run(tmp_path / str(n), VIT, 0, 700, **about) for n, about in enumerate(others)]
    other = make_run(tmp_path / "longer", VIT, 0, 700)
    (other / "recipe.yaml").write_text("epochs: 40\n")
    written = add_runs([*folders, other], tmp_path / "docs")
    assert len(written) == 4
    assert [read_raw(path).weights for path in written] == [None, None, "deit.safetensors", None]


def test_failed_runs_are_recorded(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "0", VIT, 0, 0, status="failed", error="the loss is no number")
    make_run(tmp_path / "runs" / "1", VIT, 1, 0, status="running")  # without a lock: it was killed
    make_run(tmp_path / "runs" / "2", VIT, 2, 700)
    (path,) = add_runs([tmp_path / "runs"], tmp_path / "docs")
    raw = read_raw(path)
    assert [(run.seed, run.status, run.error) for run in raw.unfinished] == [
        (0, "failed", "the loss is no number"),
        (1, "killed", ""),
    ]
    assert raw.values("accuracy") == {2: 70.0}
    assert raw.test_images == 1000


def test_adding_again(make_run: Make, make_diagnosis: Callable[..., None], tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    first = make_run(tmp_path / "first", VIT, 0, 700)
    (path,) = add_runs([first], docs)
    before = path.read_text()
    add_runs([first], docs)
    assert path.read_text() == before
    make_diagnosis(first, entropy=[4.0, 3.0])
    add_runs([first, make_run(tmp_path / "second", VIT, 1, 710)], docs)
    assert len(read_raw(path).runs) == 2
    assert read_raw(path).values("entropy") == {0: 3.5}
    assert read_raw(path).commands[1:] == [
        f"vitrefine diagnose runs/{VIT}-s$seed --data cifar100:PATH --images 320 --out runs/{VIT}-s$seed/diagnosis.html"
    ]


def test_a_nicer_run_replaces_nothing(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "nicer", VIT, 0, 999, started="2026-03-02T00:00:00+00:00")
    make_run(tmp_path / "runs" / "first", VIT, 0, 700, started="2026-03-01T00:00:00+00:00")
    (path,) = add_runs([tmp_path / "runs"], tmp_path / "docs")
    assert len(read_raw(path).runs) == 2
    assert read_raw(path).values("accuracy") == {0: 70.0}


def test_what_attention_is_like(make_run: Make, make_diagnosis: Callable[..., None], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", VIT, 0, 700)
    make_diagnosis(
        run,
        class_entropy=[4.0, 2.0],
        head_similarity=[0.9, 0.7, 0.8],
        refined_head_similarity=[0.5, 0.2],
        broadcast_mean=[0.1, 0.2, 9.0, 0.4, 0.6],
    )
    (path,) = add_runs([run], tmp_path / "docs")
    found = read_raw(path).runs[0].metrics
    assert found["class_entropy"] == 3.0
    assert found["map_similarity"] == pytest.approx(0.5)  # of the maps that meet the values, refined or not
    assert found["broadcast_mean_rise"] == pytest.approx(0.35)  # the middle layer is in neither half


def test_a_diagnosis_on_other_images_does_not_count(
    make_run: Make, make_diagnosis: Callable[..., None], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", VIT, 0, 700)
    make_diagnosis(run, data="photos", entropy=[4.0, 3.0])
    with pytest.raises(
        UserError, match=r"diagnosis\.json is on photos, and the run on cifar100:/home/somebody/cifar100"
    ):
        add_runs([run], tmp_path / "docs")
    assert not list((tmp_path / "docs").rglob("*.json"))


def test_robustness_of_the_whole_test_set_only(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", VIT, 0, 700)
    whole, part = ({"data": "cifar100:/home/somebody/cifar100", "images": images} for images in (1000, 100))
    outcomes = [{"name": "occlusion", "accuracy": {"value": 55.5}}, {"name": "pgd-1", "accuracy": {"value": 1.0}}]
    worse = [{"name": "occlusion", "accuracy": {"value": 11.1}}]
    (run / "evaluation.json").write_text(json.dumps([whole | {"robustness": outcomes}, part | {"robustness": worse}]))
    (path,) = add_runs([run], tmp_path / "docs")
    assert read_raw(path).values("occlusion") == {0: 55.5}
    assert "pgd-1" not in read_raw(path).runs[0].metrics


def test_what_cannot_be_added(make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no run in"):
        add_runs([tmp_path / "empty"], tmp_path / "docs")
    run = make_run(tmp_path / "run", VIT, 0, 700)
    for damage in ("{}", "[", '{"diagnoses": {"a": 1}}', '{"diagnoses": [{"profiles": {"entropy": [1]}}]}'):
        (run / "diagnosis.json").write_text(damage)
        with pytest.raises(UserError, match=r"diagnosis\.json is no diagnosis; delete it, or run vitrefine diagnose"):
            add_runs([run], tmp_path / "docs")
    (run / "diagnosis.json").unlink()
    same = {"data": "cifar100:/home/somebody/cifar100", "images": 1000}
    words = {"robustness": [{"name": "occlusion", "accuracy": {"value": "x"}}]}
    for damage in ("[", "3", json.dumps([same | {"robustness": [{"accuracy": 1}]}]), json.dumps([same | words])):
        (run / "evaluation.json").write_text(damage)
        with pytest.raises(UserError, match=r"evaluation\.json is no evaluation; delete it, or run vitrefine evaluate"):
            add_runs([run], tmp_path / "docs")
    assert not list((tmp_path / "docs").rglob("*.json"))


@pytest.mark.parametrize("file", ["run.json", "result.json", "recipe.yaml"])
def test_no_run_is_left_out(runs: Path, tmp_path: Path, file: str) -> None:
    (runs / "cb-1" / file).write_text("[")
    with pytest.raises(UserError, match=f"cb-1/{file} "):
        add_runs([runs], tmp_path / "docs")
    assert not list((tmp_path / "docs").rglob("*.json"))


def test_the_loss_at_the_end_is_of_the_last_epoch(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", VIT, 0, 700)
    (run / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": 19, "train_loss": 1.6}\n{"kind": "epoch", "epo')
    (path,) = add_runs([run], tmp_path / "docs")
    assert "train_loss" not in read_raw(path).runs[0].metrics


def test_damaged_results(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, wrong in (("{", "no JSON"), ('{"spec": 1}', "spec must be"), ("[]", "something else")):
        path.write_text(text)
        with pytest.raises(
            UserError, match=f"x.json is damaged: .*{wrong}.*; make it again with vitrefine claims --add"
        ):
            read_raw(path)
