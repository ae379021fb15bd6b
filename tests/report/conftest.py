"""Run folders as training leaves them, made without training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RECIPE = "epochs: 20\nbatch: 64\noptim: {lr: 0.001}\ndata: {workers: 0}\n"

MakeRun = Callable[..., Path]


def write_run(
    folder: Path,
    spec: str,
    seed: int = 0,
    *,
    right: Sequence[bool] | None = None,
    accuracy: float = 0.9,
    images: int = 360,
    epochs: int = 20,
    status: str = "finished",
    recipe: str = RECIPE,
    params: int = 5_400_000,
    macs: int = 360_000_000,
    images_per_s: float = 900.0,
    memory: float | None = 512.0,
    **about: Any,
) -> Path:
    """A run that was right on the images said, or on a share of them that only spec and seed decide."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, *spec.encode()])
    bits = np.array(right if right is not None else draw.random(images) < accuracy)
    top1 = 100 * float(bits.mean())
    known = {
        "spec": spec,
        "base_spec": spec,
        "data": "digits",
        "fingerprint": "f00d",
        "recipe": "digits",
        "seed": seed,
        "params": params,
        "macs": macs,
        "device": "CPU, 2 threads",
        "versions": {"vitrefine": "0.1.0", "torch": "2.11.0", "timm": "1.0.29"},
        "command": f"vitrefine train {spec} --data digits --recipe digits --seed {seed} --out {folder}",
        "started": f"2026-03-0{1 + seed}T10:00:00+00:00",
        "status": status,
    }
    (folder / "run.json").write_text(json.dumps(known | about))
    (folder / "recipe.yaml").write_text(recipe)
    reached = epochs if status == "finished" else epochs // 2
    progress = (1 - np.exp(-np.arange(1, reached + 1) / (0.18 * epochs))) / (1 - np.exp(-1 / 0.18))
    lines = [
        {
            "kind": "epoch",
            "epoch": epoch,
            "train_loss": 2.3 - 1.6 * done + 0.02 * float(draw.normal()),
            "test_loss": 2.3 - 2.0 * done + 0.03 * float(draw.normal()),
            "top1": 10 + (top1 - 10) * done + 0.4 * float(draw.normal()) * (epoch < epochs),
            "top5": 99.0,
            "images_per_s": images_per_s,
            "seconds": 2.0,
            "memory_mib": memory,
        }
        for epoch, done in enumerate(progress.tolist(), start=1)
    ]
    steps = [{"kind": "step", "step": 10, "epoch": 1, "loss": 2.2, "lr": 1e-3, "images_per_s": images_per_s}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*steps, *lines]))
    if status == "finished":
        result = {
            "top1": top1,
            "top5": 99.0,
            "test_loss": 0.3,
            "test_images": len(bits),
            "images_per_s": images_per_s,
            "peak_memory_mib": memory,
            "seconds": 41.0,
            "epochs": epochs,
            "params": params,
            "macs": macs,
            "correct": np.packbits(bits).tobytes().hex(),
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("vit+cb", seed=1, accuracy=0.9)` writes a run into the test's own folder."""

    def make(spec: str, seed: int = 0, **known: Any) -> Path:
        name = known.pop("name", f"{len(list(tmp_path.glob('run-*'))):03d}")
        return write_run(tmp_path / f"run-{name}", spec, seed, **known)

    return make
