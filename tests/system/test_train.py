"""`vitrefine train` and `vitrefine runs` as a user runs them: kill, Ctrl-C, resume, sentences and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vitrefine.cli import main
from vitrefine.train.job import Stopped

SPEC = "vit_tiny_patch16_224(patch_size=8,depth=1,embed_dim=24,num_heads=3)"
QUICK = ["--set", "epochs=3", "--set", "checkpoint_steps=10", "--set", "log_every=5", "--set", "checkpoint_epochs=1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "COLUMNS": "200"}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "vitrefine.cli", *args]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)


def interrupted(folder: Path, step: int, *signals: int) -> tuple[int, str, str]:
    """Train into a folder, and send signals when the log has reached a step: exit code, stdout, stderr."""
    arguments = command("train", SPEC, *QUICK, "--out", str(folder))
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    log, deadline = folder / "metrics.jsonl", time.monotonic() + 200
    while not (log.exists() and f'"step": {step}' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.001)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = run("train", SPEC, *QUICK, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_train(whole):
    folder, done = whole
    result = json.loads((folder / "result.json").read_text())
    assert done.stdout == (
        f"{result['top1']:.2f} % of 359 test images right; the model is {folder}/model.safetensors; "
        f'use it with vitrefine.load("{folder}"), see it with: vitrefine report {folder}\n'
    )
    lines = done.stderr.splitlines()
    assert re.fullmatch(
        r".*\(.*img_size=32.*\) on digits: 3 epochs of 44 updates, 0.0. M parameters, cpu in fp32; .*", lines[0]
    )
    assert re.fullmatch(r"step 5/132  loss \d\.\d+  [\d,]+ images/s  lr \d\.\d+e-\d+", lines[1])
    assert sum(line.startswith("epoch ") for line in lines) == 3


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGINT]])
def test_interrupted_and_resumed(whole, tmp_path, signals):
    code, out, err = interrupted(tmp_path / "run", 15, *signals)
    if signals == [signal.SIGKILL]:
        assert code == -signal.SIGKILL
    else:
        assert code == 0, err
        assert out.startswith("stopped after step ")
        assert out.endswith(f"--out {tmp_path / 'run'} --resume\n")
        assert "asked to stop: writing a checkpoint after this step" in err
    (row,) = json.loads(run("runs", str(tmp_path), "--json").stdout)
    assert row["status"] == ("killed" if signals == [signal.SIGKILL] else "stopped")
    done = run("train", SPEC, *QUICK, "--out", str(tmp_path / "run"), "--resume")
    assert done.returncode == 0, done.stderr
    assert "continuing after step " in done.stderr
    assert weights(tmp_path / "run") == weights(whole[0])


def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    code, _, err = interrupted(tmp_path / "run", 5, *[signal.SIGINT] * 20)
    # 0: the checkpoint was quicker; -SIGINT, which shells show as 130 too: a later one met it on its way out.
    assert code in (0, 130, -signal.SIGINT)
    assert "Traceback" not in err


def test_runs(whole):
    folder, _ = whole
    (row,) = json.loads(run("runs", str(folder.parent), "--json").stdout)
    assert (row["status"], row["epochs_done"], row["data"]) == ("finished", 3, "digits")
    assert row["result"]["top1"] == row["top1"]
    assert "correct" not in row["result"]
    table = run("runs", str(folder.parent)).stdout
    assert f"{row['top1']:.2f}" in table
    assert "finished" in table
    missing = run("runs", "nowhere")
    assert missing.returncode == 2
    assert missing.stderr == "vitrefine: there is no folder nowhere; `vitrefine train` makes runs/ where it is called\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["vit_tny_patch16_224"], "there is no model 'vit_tny_patch16_224'; did you mean vit_tiny_patch16_224"),
        ([SPEC, "--data", "cifar10:nowhere"], "there is no nowhere"),
        ([SPEC, "--recipe", "digts"], "there is no recipe 'digts'"),
        ([SPEC, "--set", "optim.lrr=1"], "--set optim.lrr=1: there is no setting optim.lrr"),
        ([SPEC, "--track", "paper"], "there is no tracker 'paper'"),
        ([SPEC, "--set", "batch=5000"], "1438 training images do not fill one step of 5000"),
    ],
)
def test_mistakes(args, sentence, tmp_path):
    done = run("train", *args, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"vitrefine: [^\n]+\n", done.stderr), done.stderr
    assert sentence in done.stderr


def test_the_command_that_continues_tracks_as_before(monkeypatch, capsys, tmp_path):
    def stop(job, watch):
        raise Stopped(7)

    monkeypatch.setattr("vitrefine.train.engine.train", stop)
    monkeypatch.setattr(sys, "argv", ["vitrefine", "train", SPEC, "--track", "tensorboard", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.endswith(f"--out {tmp_path} --track tensorboard --resume\n")


def test_a_seed_that_no_generator_takes(tmp_path):
    done = run("train", SPEC, "--seed", str(2**64), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "--seed" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_do_not_share_a_folder(tmp_path):
    """The second is refused while the first runs, and after it."""
    arguments = command("train", SPEC, *QUICK, "--out", str(tmp_path / "run"))
    first = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    while not (tmp_path / "run" / "run.json").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    second = run("train", SPEC, *QUICK, "--out", str(tmp_path / "run"), "--resume")
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert f"is being written by process {first.pid} on " in second.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(100) == 0
    third = run("train", SPEC, *QUICK, "--out", str(tmp_path / "run"))
    assert third.returncode == 2
    assert "holds a run already; continue it with --resume, or choose another --out" in third.stderr


def test_launched_with_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ["-m", "vitrefine.cli", "train", SPEC, "--set", "epochs=1", "--out", str(tmp_path / "run")]
    done = subprocess.run(launcher + job, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 359 test images right") == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2


def test_help_is_quick_and_has_examples():
    for name in ("train", "runs"):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "vitrefine.cli", name, "--help"],
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert f"vitrefine {name}" in result.stdout
        assert "Examples:" in result.stdout
        assert not imported & {"torch", "timm", "accelerate", "numpy"}
