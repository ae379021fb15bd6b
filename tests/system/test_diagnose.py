"""`vitrefine diagnose` as a user runs it."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vitrefine

VIT = "vit_tiny_patch16_224(depth=2,embed_dim=24,img_size=32,num_heads=2,patch_size=8,num_classes=10)"
MAIN = (sys.executable, "-m", "vitrefine.cli")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, "diagnose", *args], capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=ENVIRONMENT
    )


def test_a_checkpoint_beside_a_spec(tmp_path: Path) -> None:
    vitrefine.save(vitrefine.create(f"{VIT}+cb"), tmp_path / "m.safetensors")
    result = run("m.safetensors", VIT, "--data", "digits", "--images", "8", "--out", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "8 images, m.safetensors\n  - all layers are nearly uniform" in result.stdout
    assert "8 images, no training: random weights" in result.stdout
    assert "the page is page.html; all numbers are in page.csv and page.json" in result.stdout
    page = (tmp_path / "page.html").read_text()
    assert "vitrefine diagnose m.safetensors" in page
    document = json.loads((tmp_path / "page.json").read_text())
    assert (document["data"], len(document["diagnoses"])) == ("digits", 2)
    models = {row["model"] for row in csv.DictReader((tmp_path / "page.csv").open())}
    assert len(models) == 2


def make_run(folder: Path, data: str) -> None:
    folder.mkdir()
    about = {"spec": VIT, "base_spec": VIT, "data": data, "fingerprint": "", "recipe": "", "seed": 0}
    (folder / "run.json").write_text(json.dumps({**about, "status": "finished"}))
    vitrefine.save(vitrefine.create(VIT), folder / "model.safetensors")


def test_a_run_knows_its_data(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "digits")
    result = run("run", "+cb", "--images", "4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "4 images, the run in run\n" in result.stdout
    assert "diagnosis · digits · 4 images" in (tmp_path / "diagnosis.html").read_text()
    make_run(tmp_path / "other", "cifar100:gone")
    result = run("run", "other", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "vitrefine: run is a run on digits and other one on cifar100:gone; say with --data on which images to look\n"
    )


def test_a_run_has_weights_of_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "digits")
    result = run("run", "+cb", "--pretrained", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "vitrefine: run holds its own weights; leave --pretrained out\n"


def test_two_of_one_name_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "digits")
    result = run("run", VIT, "--images", "2", "--csv", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    names = {f"{VIT} (first)", f"{VIT} (second)"}
    assert {row["model"] for row in csv.DictReader(io.StringIO(result.stdout))} == names
    assert {each["model"] for each in json.loads((tmp_path / "diagnosis.json").read_text())["diagnoses"]} == names


def test_csv_and_a_modification(tmp_path: Path) -> None:
    result = run(VIT, "+refiner", "--data", "digits", "--images", "8", "--csv", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["model"] for row in rows} == {VIT, f"{VIT}+refiner"}
    assert {"entropy", "distance", "refined_head_similarity"} <= {row["quantity"] for row in rows}
    assert (tmp_path / "diagnosis.html").is_file()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((VIT,), "is no run, which would know its data; say with --data on which images to look"),
        (("runs/gone",), "there is no folder runs/gone; give the folder of a run"),
        ((VIT, "runs/gone", "--data", "digits"), "there is no folder runs/gone; give the folder of a run"),
        (("vit_tinny_patch16_224", "--data", "digits"), "vit_tinny_patch16_224"),
        (("gone.safetensors", "--data", "digits"), "there is no file gone.safetensors"),
        ((VIT, "--data", "nowhere"), "there is no data set or folder 'nowhere'"),
        ((VIT, "--data", "digits", "--out", "gone/page.html"), "gone/page.html cannot be written"),
        (
            (VIT, "--data", "digits", "--out", "page.txt"),
            "--out page.txt is to be a page; name a file that ends in .html",
        ),
        (("test_resnet", "--data", "digits", "--images", "2"), "ResNet has no attention to look at"),
    ],
)
def test_mistakes(args: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    result = run(*args, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("vitrefine: ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_has_examples(tmp_path: Path) -> None:
    result = run("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "vitrefine diagnose runs/baseline-s0 runs/cb-s0" in result.stdout
