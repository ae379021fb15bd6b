"""Folders of runs and of documentation, made without training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RECIPE = "epochs: 20\nbatch: 64\noptim: {lr: 0.001}\nlog_every: 50\n"
VIT = "vit_tiny_patch16_224"

LEDGER = """\
title: A paper
paper: Somebody, Something (2020)
usual: {data: cifar100, recipe: cifar, seeds: 3}
claims:
  table-1-cb:
    where: "Table 1: CB"
    claim: CB helps.
    printed: {top-1 %: {ViT: 72.2, +CB: 73.4}}
    test: {first: vit_tiny_patch16_224, second: vit_tiny_patch16_224+cb, expect: higher}
  table-1-se:
    where: "Table 1: SE"
    claim: SE helps | a little.
    test: {first: vit_tiny_patch16_224, second: vit_tiny_patch16_224+se, expect: higher}
  table-2-cb:
    where: "Table 2: CB"
    claim: CB helps, again.
    same_as: table-1-cb
  figure-1:
    where: "Figure 1: a drawing"
    claim: Nothing.
    not_run: it is a drawing
"""


def write_run(folder: Path, spec: str, seed: int, right: int, status: str = "finished", **about: Any) -> Path:
    """A run that got so many of 1000 test images right."""
    folder.mkdir(parents=True)
    known = {
        "spec": f"{spec} as it fits",
        "base_spec": spec,
        "data": "cifar100:/home/somebody/cifar100",
        "fingerprint": "f00d",
        "recipe": "cifar",
        "seed": seed,
        "weights": None,
        "params": 5_400_000,
        "macs": 360_000_000,
        "device": "NVIDIA H200",
        "versions": {"vitrefine": "0.1.0", "torch": "2.11.0"},
        "command": f"vitrefine train '{spec}' --data cifar100:/home/somebody/cifar100 --recipe cifar --set batch=64 "
        f"--seed {seed} --out {folder}",
        "started": f"2026-03-01T10:0{seed}:00+00:00",
        "status": status,
    }
    (folder / "run.json").write_text(json.dumps(known | about))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "epoch", "epoch": 20, "train_loss": 1.5}) + "\n")
    if status == "finished":
        bits = np.arange(1000) < right
        result = {
            "top1": right / 10,
            "top5": 99.0,
            "test_loss": 0.3,
            "test_images": 1000,
            "images_per_s": 900.0,
            "peak_memory_mib": 512.0,
            "seconds": 120.0,
            "epochs": 20,
            "params": 5_400_000,
            "macs": 360_000_000,
            "correct": np.packbits(bits).tobytes().hex(),
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_diagnosis(run: Path, data: str = "cifar100:/data/cifar100", **means: list[float]) -> None:
    """What `vitrefine diagnose RUN --out RUN/diagnosis.html` leaves: per quantity a mean for each layer."""
    profiles = {
        key: [
            {"number": number, "layer": f"blocks.{number}", "head": head, "mean": value + (head == 0), "bound": None}
            for number, value in enumerate(values)
            for head in ("all", 0)
        ]
        for key, values in means.items()
    }
    found = {"model": "vit", "images": 320, "findings": [], "profiles": profiles, "cka": None}
    (run / "diagnosis.json").write_text(json.dumps({"data": data, "diagnoses": [found]}))


Docs = Callable[..., Path]
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run() -> MakeRun:
    return write_run


@pytest.fixture
def make_diagnosis() -> Callable[..., None]:
    return write_diagnosis


@pytest.fixture
def make_docs(tmp_path: Path) -> Docs:
    """`make_docs(text)` makes docs/ with one ledger."""

    def make(text: str = LEDGER) -> Path:
        docs = tmp_path / "docs"
        (docs / "claims").mkdir(parents=True, exist_ok=True)
        (docs / "claims" / "paper.yaml").write_text(text)
        return docs

    return make


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of ViT and of ViT + CB, which is better by 1.0, 1.2 and 1.4 points."""
    folder = tmp_path / "runs"
    for seed, (plain, broadcast) in enumerate([(700, 710), (704, 716), (698, 712)]):
        write_run(folder / f"plain-{seed}", VIT, seed, plain)
        write_run(folder / f"cb-{seed}", f"{VIT}+cb", seed, broadcast)
    return folder
