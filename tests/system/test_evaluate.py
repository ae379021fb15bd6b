"""`vitrefine evaluate` as a user runs it: figures, JSON, Ctrl-C, sentences and exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from torch import OutOfMemoryError
from typer.main import get_command

import vitrefine
from vitrefine.cli import main
from vitrefine.cli.app import app
from vitrefine.cli.evaluate import evaluate as evaluate_command
from vitrefine.errors import UserError
from vitrefine.evaluate.cache import default_folder

SPEC = "vit_tiny_patch16_224(patch_size=8,depth=1,embed_dim=24,num_heads=3)"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "COLUMNS": "200"}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "vitrefine.cli", *args]


def environment(cache: Path) -> dict[str, str]:
    return {**ENVIRONMENT, "VITREFINE_CACHE": str(cache)}


def run(cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=300, check=False, env=environment(cache)
    )


def complaint(cache: Path, *args: str) -> str:
    result = run(cache, "evaluate", *args)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    done = run(folder, "train", SPEC, "--set", "epochs=3", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run(trained, tmp_path):
    """What training measured is what evaluation measures."""
    done = run(tmp_path, "evaluate", str(trained))
    assert done.returncode == 0, done.stderr
    result = json.loads((trained / "result.json").read_text())
    assert done.stdout.startswith(f"{SPEC} on {result['test_images']} images of digits")
    (kept,) = json.loads((trained / "evaluation.json").read_text())
    assert kept["accuracy"]["top1"]["value"] == pytest.approx(result["top1"], abs=0.3)
    assert kept["accuracy"]["loss"] == pytest.approx(result["test_loss"], rel=0.01)
    assert "images as they are: 359" in done.stderr


def test_a_checkpoint_in_json(trained, tmp_path):
    model, out = tmp_path / "own.safetensors", tmp_path / "out.json"
    model.write_bytes((trained / "model.safetensors").read_bytes())
    arguments = ("--data", "digits", "--limit", "40", "--suite", "robustness", "--suite", "rfc", "--repeats", "2")
    first = run(tmp_path, "evaluate", str(model), *arguments, "--json", "--out", str(out))
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert found == json.loads(out.read_text())
    assert (found["images"], "accuracy" in found) == (40, False)
    again = run(tmp_path, "evaluate", str(model), *arguments, "--json")
    assert json.loads(again.stdout) == found
    assert "FGSM" not in again.stderr  # nothing was computed anew


def test_ctrl_c(trained, tmp_path):
    arguments = ("evaluate", str(trained), "--suite", "robustness", "--batch", "8", "--limit", "64")
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("predictions/*.npz")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert out == ""
    assert f"go on with: vitrefine evaluate {trained} --suite robustness --batch 8 --limit 64\n" in err
    assert "Traceback" not in err
    done = run(tmp_path, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert "images as they are" not in done.stderr
    whole = run(tmp_path / "other", *arguments, "--json")
    assert json.loads(done.stdout) == json.loads(whole.stdout)


def test_complaints(trained, tmp_path):
    model = str(trained / "model.safetensors")
    assert complaint(tmp_path, SPEC, "--data", "digits").startswith(f"vitrefine: {SPEC} is a spec, and its weights")
    assert "say with --data what to test it on" in complaint(tmp_path, SPEC, "--pretrained")
    assert "there is no file no.safetensors" in complaint(tmp_path, "no.safetensors", "--data", "digits")
    assert "there is no folder runs/gone; give the folder of a run" in complaint(tmp_path, "runs/gone")
    assert "there is no file no.safetensors" in complaint(tmp_path, "no.safetensors")
    assert "there is no suite 'fast'" in complaint(tmp_path, model, "--suite", "fast")
    assert "--out takes a file" in complaint(tmp_path, model, "--out", str(tmp_path))
    assert "cannot take images of 30×30 pixels" in complaint(tmp_path, model, "--size", "30")


def test_figures_that_cannot_be_kept_are_printed(trained, tmp_path):
    """A run's folder that cannot be written to, here because of what is in the file's place."""
    other = tmp_path / "run"
    shutil.copytree(trained, other, ignore=shutil.ignore_patterns("evaluation.json"))
    (other / "evaluation.json").mkdir()
    done = run(tmp_path, "evaluate", str(other), "--limit", "20", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["images"] == 20
    assert done.stderr.endswith("see that there is room and that it may be written, or keep them with --out\n")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_figures_that_cannot_be_printed_are_kept(trained, tmp_path):
    out = tmp_path / "out.json"
    arguments = command("evaluate", str(trained), "--limit", "20", "--out", str(out))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment(tmp_path)
        )
    assert done.returncode == 2
    assert "the output: No space left on device; see to that, and run this again" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(out.read_text())["images"] == 20


def test_too_little_memory(monkeypatch):
    def greedy(*_, **__):
        raise OutOfMemoryError

    monkeypatch.setattr("vitrefine.evaluate.suite.evaluate", greedy)
    with pytest.raises(UserError, match="64 images at once need too much memory; give a smaller --batch"):
        evaluate_command("model", data="digits")


def test_a_killed_worker_gets_a_sentence(tmp_path, monkeypatch, capsys):
    """As the kernel kills one when memory runs out."""
    for number in range(10):
        folder = tmp_path / "photos" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    model = tmp_path / "model.safetensors"
    vitrefine.save(vitrefine.create(f"{SPEC[:-1]},img_size=8,num_classes=2)"), model)
    monkeypatch.setattr("vitrefine.data.folder.read_picture", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    options = ["--data", str(tmp_path / "photos"), "--workers", "1", "--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["vitrefine", "evaluate", str(model), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "a process that reads images ended (DataLoader worker (pid" in capsys.readouterr().err


def test_help_says_where_the_cache_is(monkeypatch):
    for name in ("VITREFINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (cache,) = (option for option in get_command(app).commands["evaluate"].params if option.name == "cache")
    assert f"{Path('~') / default_folder().relative_to(Path.home())} if left out" in cache.help


def test_help_has_examples_and_no_torch():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vitrefine.cli", "evaluate", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0
    assert "vitrefine evaluate deit_tiny_patch16_224 --pretrained --data imagenet-a:/data/imagenet-a" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "timm", "numpy", "scipy"}
