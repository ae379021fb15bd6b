"""Training with its data: images a second and MFU, ours beside timm's own loader and training step, in one run.

    python benchmarks/train_throughput.py [--only 32] [--out benchmarks/results]

Ours is `vitrefine.train.engine.train` as the command line calls it: a set in memory, the recipe `cifar` (crop, flip,
RandAugment, mixup, CutMix, erasing), checkpoints and logs. timm's is its loader (Pillow in sixteen worker processes,
prefetched, mixup in the collation) with the same augmentation, its model compiled, and the step of its training script.
Both: bfloat16 autocast, fused AdamW, one GPU. "Bare" is that step on one batch of noise, without any data.

Every entry is a process of its own: all build and compile at once, then each is timed alone, in turn. MFU counts three
times the forward's multiply-accumulates against the 989 TFLOP/s of an H200 in bfloat16. Writes
results/train_throughput.csv.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

RESULTS = Path(__file__).parent / "results"
PEAK = 989e12
CLASSES, WORKERS = 100, 16
CASES: dict[str, dict[str, Any]] = {
    "ViT-Ti/4 at 32": {"model": "vit_tiny_patch16_224", "size": 32, "patch": 4, "batch": 1024, "images": 51200},
    "ViT-S/4 at 32": {"model": "vit_small_patch16_224", "size": 32, "patch": 4, "batch": 1024, "images": 51200},
    "ViT-S/16 at 224": {"model": "vit_small_patch16_224", "size": 224, "patch": 16, "batch": 256, "images": 10240},
}
KINDS = ("ours", "timm", "bare")


class Turn:
    """Lets one process of several be timed at a time, when all have warmed up."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.folder, self.number, self.count = folder, number, count

    def wait(self) -> None:
        (self.folder / f"ready-{self.number}").touch()
        while len(list(self.folder.glob("ready-*"))) < self.count or not self._others_before_are_done():
            time.sleep(0.05)

    def _others_before_are_done(self) -> bool:
        return len(list(self.folder.glob("done-*"))) >= self.number

    def end(self) -> None:
        for mark in ("ready", "done"):
            (self.folder / f"{mark}-{self.number}").touch()


def pixels(case: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    size = case["size"]
    images = torch.randint(256, (case["images"], 3, size, size), dtype=torch.uint8)
    return images, torch.randint(CLASSES, (len(images),))


def ours(case: dict[str, Any], turn: Turn) -> list[float]:
    from vitrefine.data.arrays import ArraySet, Split
    from vitrefine.data.memory import MemorySet
    from vitrefine.train import engine
    from vitrefine.train.job import Silent
    from vitrefine.train.recipe import load_recipe

    images, labels = pixels(case)
    names = tuple(map(str, range(CLASSES)))
    data = MemorySet("noise", ArraySet("noise", Split(images, labels), Split(images[:256], labels[:256]), names))
    rates: list[float] = []

    class Watch(Silent):
        def on_epoch(self, line: dict[str, Any]) -> None:
            if line["epoch"] == 1:
                turn.wait()
            else:
                rates.append(line["images_per_s"])

    overrides = [
        "epochs=4",
        f"batch={case['batch']}",
        "checkpoint_epochs=4",
        "schedule.warmup_epochs=0",
        "log_every=10",
    ]
    recipe = load_recipe("cifar", overrides)
    spec = f"{case['model']}(patch_size={case['patch']},img_size={case['size']})"
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(engine, "open_data", return_value=data):
        engine.train(engine.Job(spec, "noise", recipe, "cifar", Path(folder) / "run"), watch=Watch())
    return rates


def timms(case: dict[str, Any], turn: Turn, *, bare: bool) -> list[float]:
    import timm
    import torch
    from timm.data import FastCollateMixup, create_loader
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import dispatch_clip_grad
    from torch.utils.data import Dataset

    torch.set_float32_matmul_precision("high")
    arguments = {"img_size": case["size"], "patch_size": case["patch"], "num_classes": CLASSES, "drop_path_rate": 0.1}
    model = timm.create_model(case["model"], **arguments).cuda().train()
    optimiser = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, fused=True)
    run, criterion = torch.compile(model), SoftTargetCrossEntropy()

    def step(images: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(run(images), targets)
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    if bare:
        images = torch.randn(case["batch"], 3, case["size"], case["size"], device="cuda")
        targets = torch.rand(case["batch"], CLASSES, device="cuda").softmax(dim=-1)
        batches: Any = [(images, targets)] * (case["images"] // case["batch"])
    else:
        from PIL import Image

        pixel, label = pixels(case)

        class Pictures(Dataset):
            def __init__(self) -> None:
                self.transform: Any = None

            def __len__(self) -> int:
                return len(label)

            def __getitem__(self, index: int) -> Any:
                return self.transform(Image.fromarray(pixel[index].permute(1, 2, 0).numpy())), int(label[index])

        batches = create_loader(
            Pictures(),
            input_size=(3, case["size"], case["size"]),
            batch_size=case["batch"],
            is_training=True,
            use_prefetcher=True,
            re_prob=0.25,
            re_mode="pixel",
            auto_augment="rand-m9-mstd0.5-inc1",
            scale=(0.8, 1.0),
            num_workers=WORKERS,
            collate_fn=FastCollateMixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES),
            persistent_workers=True,
        )
    rates = []
    for epoch in range(4 if bare else 2):
        if epoch == 1:
            turn.wait()
        torch.cuda.synchronize()
        began, seen = time.perf_counter(), 0
        for images, targets in batches:
            step(images, targets)
            seen += len(images)
            if epoch == 0 and seen >= 4 * case["batch"]:
                break
        torch.cuda.synchronize()
        if epoch:
            rates.append(seen / (time.perf_counter() - began))
    return rates


def one(kind: str, name: str, number: int, count: int, folder: Path) -> None:
    turn = Turn(folder, number, count)
    try:
        case = CASES[name]
        rates = ours(case, turn) if kind == "ours" else timms(case, turn, bare=kind == "bare")
        print(json.dumps(rates), flush=True)
        sys.stdout.flush()
    finally:
        turn.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Cases with this in their name.")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, name, number, count, folder = arguments.one
        one(kind, name, int(number), int(count), Path(folder))
    else:
        compare(arguments.only, arguments.kinds, arguments.out)


def compare(only: str, kinds: list[str], out: Path) -> None:
    import timm
    import torch

    from vitrefine.cli.info import cost_of

    jobs = [(kind, name) for name in CASES if only in name for kind in kinds]
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = []
        for number, (kind, name) in enumerate(jobs):
            command = [sys.executable, __file__, "--one", kind, name, str(number), str(len(jobs)), folder]
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            running.append((kind, name, log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)))
        for kind, name, log, process in running:
            output, _ = process.communicate()
            case = CASES[name]
            row = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "timm": timm.__version__}
            row |= {"case": name, "batch": case["batch"], "kind": kind, "cores": os.cpu_count()}
            if process.returncode:
                log.seek(0)
                row |= {"note": log.read().strip().splitlines()[-1]}
            else:
                rates = sorted(json.loads(output.strip().splitlines()[-1]))
                macs = cost_of(f"{case['model']}(patch_size={case['patch']},img_size={case['size']})").macs
                middle = rates[len(rates) // 2]
                row |= {"images_per_s": round(middle), "least": round(rates[0]), "most": round(rates[-1])}
                row |= {"mfu": round(6 * macs * middle / PEAK, 3), "epoch_of_50k_s": round(50_000 / middle, 2)}
            rows.append(row)
            print({key: row[key] for key in list(row)[3:]}, flush=True)
    fields = list(dict.fromkeys(key for row in rows for key in row))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "train_throughput.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
