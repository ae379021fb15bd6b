"""Runs that cannot be lost: killed, stopped, damaged or out of disk, they continue to the same bits."""

import itertools
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vitrefine.train.run import read_run

KILLED = [-signal.SIGKILL]
STEPS = (2, 10, 24, 34)  # of 44, and far enough apart for each to be reached after the accident before
# Drop path and dropout, so that the generators count; a running mean; accumulation.
OVERRIDES = ["model.drop_path=0.2", "model.drop=0.1", "model.ema=0.9", "accumulate=2", "checkpoint_steps=3"]

GPU_OVERRIDES = [*(each for each in OVERRIDES if each != "accumulate=2"), "deterministic=true"]


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def figures(folder: Path) -> list[dict[str, float]]:
    """The lines of the log without what depends on the machine's mood."""
    moods = {"images_per_s", "seconds", "memory_mib"}
    return [{k: v for k, v in line.items() if k not in moods} for line in read_run(folder).metrics()]


@pytest.fixture(scope="module")
def whole(stages, tmp_path_factory):
    """A run to which nothing happened."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    (calm,) = stages({"folder": folder, "overrides": OVERRIDES})
    assert calm["codes"] == [0], calm
    return folder


def assert_same(folder, whole, story):
    assert weights(folder) == weights(whole), story
    assert figures(folder) == figures(whole), story
    assert read_run(folder).result.correct == read_run(whole).result.correct
    assert read_run(folder).status == "finished"
    assert not list(folder.rglob("*.part"))


def test_a_killed_run_resumes_to_the_same_bits(stages, whole, tmp_path):
    """One run is killed again and again, at random moments and while it writes a checkpoint."""
    again = {"folder": tmp_path / "run", "overrides": OVERRIDES, "resume": True}
    chance = random.Random()
    moments = [{"kill_at": chance.randint(step, step + 4), "kill_delay": chance.uniform(0, 0.1)} for step in STEPS]
    accidents = [*moments[:2], {"kill_in": "checkpoint"}, *moments[2:]]
    *killed, last = stages(*[again | accident for accident in accidents], again)
    assert [outcome["codes"] for outcome in killed] == [KILLED] * len(accidents), (accidents, killed)
    assert last["codes"] == [0], last
    assert_same(tmp_path / "run", whole, accidents)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("how", ["compile=auto", "compile=true", "compile=false"])
def test_a_killed_run_resumes_to_the_same_bits_on_a_gpu(how, stages, tmp_path):
    """With deterministic kernels: as CUDA graphs, compiled, and plain."""
    once, again = ({"folder": tmp_path / name, "overrides": [*GPU_OVERRIDES, how], "resume": True} for name in "ab")
    accidents = [{"kill_at": 7}, {"kill_at": 20, "kill_delay": 0.02}]
    calm, *killed, last = stages(once, *[again | accident for accident in accidents], again, cpu=False)
    assert [outcome["codes"] for outcome in killed] == [KILLED] * len(accidents), killed
    assert calm["codes"] == last["codes"] == [0], (calm, last)
    assert_same(tmp_path / "b", tmp_path / "a", accidents)


def test_a_run_that_was_stopped_continues(stages, whole, tmp_path):
    again = {"folder": tmp_path / "run", "overrides": OVERRIDES, "resume": True}
    (stopped,) = stages(again | {"term_at": 7})
    assert stopped["codes"] == [0]
    assert "asked to stop: writing a checkpoint after this step" in stopped["said"]
    run = read_run(tmp_path / "run")
    assert run.status == "stopped"
    assert run.result is None
    assert [line["step"] for line in run.metrics("step")] == list(range(1, 8))
    (done,) = stages(again)
    assert done["codes"] == [0]
    assert done["said"][0].startswith("continuing after step 7, from ")
    assert_same(tmp_path / "run", whole, done)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(stages, whole, tmp_path):
    again = {"folder": tmp_path / "run", "overrides": OVERRIDES, "resume": True}
    (killed,) = stages(again | {"kill_at": 10})
    assert killed["codes"] == KILLED
    assert read_run(tmp_path / "run").status == "killed"
    before, newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    (done,) = stages(again)
    assert done["codes"] == [0]
    assert done["said"][0] == f"{newest} is damaged; going back to {before.name}"
    assert_same(tmp_path / "run", whole, done)


def test_a_full_disk_does_not_destroy_the_last_checkpoint(stages, whole, tmp_path):
    again = {"folder": tmp_path / "run", "overrides": OVERRIDES, "resume": True}
    (full,) = stages(again | {"limit_at": 7, "file_limit": 50_000})
    assert full["codes"] == [2]
    (rescued,) = (tmp_path / "run" / "checkpoints").glob("step-00000006-*")
    assert full["said"][-1] == (
        f"error: the checkpoint of step 9 cannot be written (File too large); {rescued} is whole, "
        "so make room and continue with --resume"
    )
    assert read_run(tmp_path / "run").status == "failed"
    (done,) = stages(again)
    assert done["codes"] == [0]
    assert_same(tmp_path / "run", whole, done)


def test_images_read_by_workers_resume_to_the_same_bits(stages, tmp_path):
    """Worker processes may draw from the generators when they start; a run that resumes starts them once more."""
    noise = np.random.default_rng(0)
    for part, name, number in itertools.product(("train", "val"), ("cats", "dogs"), range(24)):
        folder = tmp_path / "photos" / part / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    overrides = ["model.drop_path=0.3", "batch=8", "data.size=32", "data.workers=2", "checkpoint_steps=2"]
    jobs = [{"folder": tmp_path / x, "data": f"folder:{tmp_path}/photos", "overrides": overrides} for x in "ab"]
    again = jobs[1] | {"resume": True}
    *done, last = stages(jobs[0], again | {"kill_at": 3}, again | {"kill_at": 9}, again)
    assert [outcome["codes"] for outcome in done] == [[0], KILLED, KILLED], done
    assert last["codes"] == [0], last
    assert_same(tmp_path / "b", tmp_path / "a", last)
