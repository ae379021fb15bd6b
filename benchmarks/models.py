"""Whole models: images a second in training and inference, and peak memory, ours beside timm's in the same run.

    python benchmarks/models.py [--only LIT Swin] [--passes training] [--sizes 224] [--out benchmarks/results]

Training is bfloat16 autocast over float32 weights, cross entropy and fused AdamW; inference is bfloat16 weights. Every
entry is a process of its own. A few at a time build and compile theirs and make their first steps; then each of them is
timed alone, one after the other, before the next few begin. Memory is what a step takes beyond what is held between
steps (weights, optimiser, images). Writes results/models.csv.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import triton
from torch import nn

RESULTS = Path(__file__).parent / "results"
STEPS, AT_ONCE = 12, 5

# What it is called, timm's name, options, compiled or not, with our kernels or without.
ENTRIES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "DeiT-S (timm)": ("deit_small_patch16_224", {}, True, True),
    "Refined-ViT-S, paper": ("refined_vit_s", {"variant": "paper"}, True, True),
    "Swin-T (timm)": ("swin_tiny_patch4_window7_224", {}, True, True),
    "LIT-S": ("lit_s", {}, True, True),
    "PVTv2-b2 (timm)": ("pvt_v2_b2", {}, True, True),
    "LIT-Ti": ("lit_ti", {}, True, True),
    "Refined-ViT-L, paper": ("refined_vit_l", {"variant": "paper"}, True, True),
    "Refined-ViT-S, authors'": ("refined_vit_s", {}, True, True),
    "Refined-ViT-S, paper, no kernels": ("refined_vit_s", {"variant": "paper"}, False, False),
    "Refined-ViT-S, authors', no kernels": ("refined_vit_s", {}, False, False),
    "LIT-S, no kernels": ("lit_s", {}, False, False),
    "LIT-Ti, no kernels": ("lit_ti", {}, False, False),
}


def build(name: str, options: dict[str, Any], size: int) -> nn.Module:
    import vitrefine.models  # noqa: F401  registers ours

    torch.manual_seed(0)
    sized = {} if name.startswith("pvt_v2") else {"img_size": size}
    return timm.create_model(name, **options, **sized).cuda()


def compiled(model: nn.Module) -> Callable[..., Any]:
    if len(getattr(model, "blocks", ())) > 20:  # deep: block by block, or compiling would take minutes
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(dynamic=False)
        return model
    return torch.compile(model, dynamic=False)


def training(name: str, options: dict[str, Any], batch: int, fast: bool, size: int) -> Callable[[], None]:
    model = build(name, options, size).train()
    run = compiled(model) if fast else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, 3, size, size, device="cuda")
    labels = torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def inference(name: str, options: dict[str, Any], batch: int, fast: bool, size: int) -> Callable[[], None]:
    model = build(name, options, size).eval().bfloat16()
    run = compiled(model) if fast else model
    images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)

    @torch.inference_mode()
    def step() -> None:
        run(images)

    return step


def timed(step: Callable[[], None], batch: int) -> dict[str, float]:
    """Images a second, and GiB at the peak of a step."""
    step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    rates = [1000 * batch / times[i] for i in (STEPS // 2, STEPS * 9 // 10, STEPS // 10)]
    return {
        "images_per_s": round(rates[0], 1),
        "p10": round(rates[1], 1),
        "p90": round(rates[2], 1),
        "peak_gib": round((torch.cuda.max_memory_allocated() - held) / 2**30, 2),
    }


def one(label: str, batch: int, passes: list[str], sizes: list[int]) -> None:
    """The process of one entry: prepare, say so, wait for a turn, time, print."""
    name, options, fast, kernels = ENTRIES[label]
    torch.set_float32_matmul_precision("high")
    if not kernels:
        from vitrefine.ops import choice

        choice._device_runs = lambda *_: False  # type: ignore[assignment]
    makers: dict[tuple[str, int, int], Callable[[], Callable[[], None]]] = {}
    for what, size in itertools.product(passes, sizes):
        make = training if what == "training" else inference
        heavy = what == "training" and (name.endswith("_l") or not kernels)
        count = batch // (2 if heavy else 1) // (4 if size > 224 else 1)
        makers[what, size, count] = partial(make, name, options, count, fast, size)
    steps: dict[tuple[str, int, int], Callable[[], None]] = {}
    problems: dict[tuple[str, int, int], str] = {}
    for key, make in makers.items():
        try:
            steps[key] = make()
            for _ in range(2):
                steps[key]()
            torch.cuda.synchronize()
        except Exception as problem:
            steps.pop(key, None)
            problems[key] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
        torch.cuda.empty_cache()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return  # whoever would have given the word is gone
    rows = []
    for (what, size, count), step in steps.items():
        rows.append({"pass": what, "size": size, "batch": count, **timed(step, count)})
        torch.cuda.empty_cache()
    print(json.dumps({"rows": rows, "problems": [f"{key}: {why}" for key, why in problems.items()]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=[""], help="entries whose name contains one of these")
    parser.add_argument("--passes", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 384])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.batch, options.passes, options.sizes)
        return

    def prepare(label: str) -> subprocess.Popen:
        command = [sys.executable, __file__, "--one", label, "--batch", str(options.batch), "--passes", *options.passes]
        command += ["--sizes", *map(str, options.sizes)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        print(f"{label} is ready", flush=True)
        return process

    labels = [label for label in ENTRIES if any(part in label for part in options.only)]
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "timm": timm.__version__,
    }
    rows: list[dict[str, object]] = []
    for some in (labels[i : i + AT_ONCE] for i in range(0, len(labels), AT_ONCE)):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            processes = list(pool.map(prepare, some))
        for label, process in zip(some, processes, strict=True):
            answer, _ = process.communicate("go\n")
            found = json.loads((answer.splitlines() or ['{"rows": [], "problems": ["no answer"]}'])[-1])
            mode = "compiled" if ENTRIES[label][2] else "eager"
            for row in found["rows"]:
                rows.append({**machine, "model": label, "mode": mode, **row})
                print(
                    f"{label:36s} {row['pass']:9s} {row['size']} B{row['batch']:<4d} {row['images_per_s']:8.0f} img/s "
                    f"({row['p10']:.0f}-{row['p90']:.0f}) {row['peak_gib']:6.2f} GiB",
                    flush=True,
                )
            for problem in found["problems"]:
                print(f"{label:36s} {problem[:200]}", flush=True)
            write(rows, options.out)


def write(rows: list[dict[str, object]], folder: Path) -> None:
    """What there is so far, so that a run that is stopped loses nothing."""
    if not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "models.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
