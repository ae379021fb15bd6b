"""Whole models: images a second in training and inference, and peak memory, ours beside timm's in the same run.

    python benchmarks/models.py [--only LIT Swin] [--passes training] [--sizes 224] [--graphs] [--out FOLDER]
    python benchmarks/models.py --specs "vit_tiny_patch16_224(patch_size=4)+cb" … --sizes 32 --batch 512 --graphs

Training is bfloat16 autocast over float32 weights, cross entropy and fused AdamW; inference is bfloat16 weights. With
--graphs what is compiled is replayed as CUDA graphs, as `vitrefine train` does on one GPU. Every entry is a process of
its own. A few at a time build and compile theirs and make their first steps; then each of them is timed alone, one
after the other, before the next few begin. Memory is what a step takes beyond what is held between steps (weights,
optimiser, images). Rows of results/models.csv are replaced by newer ones of the same model and kind.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import triton
from measure import RESULTS, replace_rows
from torch import nn

import vitrefine

STEPS, AT_ONCE = 12, 8

# What it is called, timm's name, options, compiled or not, with our kernels or without.
ENTRIES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "DeiT-S (timm)": ("deit_small_patch16_224", {}, True, True),
    "Refined-ViT-S, paper": ("refined_vit_s", {"variant": "paper"}, True, True),
    "DeiT-S + refiner": ("deit_small_patch16_224+refiner", {}, True, True),
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
    torch.manual_seed(0)
    sized = {} if name.startswith("pvt_v2") else {"img_size": size}
    return vitrefine.create(name, **options, **sized).cuda()


def compiled(model: nn.Module, graphs: bool) -> Callable[..., Any]:
    if len(getattr(model, "blocks", ())) > 20 and not graphs:  # deep: block by block, or compiling would take minutes
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(dynamic=False)
        return model
    return torch.compile(model, dynamic=False, mode="reduce-overhead" if graphs else None)


def training(run: Callable[..., Any], model: nn.Module, batch: int, size: int) -> Callable[[], None]:
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


def inference(run: Callable[..., Any], model: nn.Module, batch: int, size: int) -> Callable[[], None]:
    model.eval().bfloat16()
    images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)

    @torch.inference_mode()
    def step() -> None:
        run(images)

    return step


def first_steps(step: Callable[[], None]) -> float:
    """GiB at the peak of the second of some steps: that is when graphs are recorded, with their memory."""
    step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    step()
    torch.cuda.synchronize()
    return round((peak - held) / 2**30, 2)


def timed(step: Callable[[], None], batch: int) -> dict[str, float]:
    """Images a second."""
    step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    places = {"images_per_s": STEPS // 2, "p10": STEPS * 9 // 10, "p90": STEPS // 10}
    return {name: round(1000 * batch / times[place], 1) for name, place in places.items()}


def one(label: str, batch: int, passes: list[str], sizes: list[int], graphs: bool) -> None:
    """The process of one entry: prepare, say so, wait for a turn, time, print."""
    name, options, fast, kernels = ENTRIES.get(label, (label, {}, True, True))
    torch.set_float32_matmul_precision("high")
    if not kernels:
        from vitrefine.ops import choice

        choice._device_runs = lambda *_: False
    ready: list[tuple[Callable[[], None], dict[str, Any]]] = []
    problems: list[str] = []
    for what, size in itertools.product(passes, sizes):
        heavy = what == "training" and (name.endswith("_l") or not kernels)
        count = batch // (2 if heavy else 1) // (4 if size > 224 else 1)
        try:
            model = build(name, options, size)
            run = compiled(model, graphs) if fast else model
            step = (training if what == "training" else inference)(run, model, count, size)
            ready.append((step, {"pass": what, "size": size, "batch": count, "peak_gib": first_steps(step)}))
        except Exception as problem:
            problems.append(f"{what} at {size}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
        torch.cuda.empty_cache()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return  # whoever would have given the word is gone
    rows = [row | timed(step, row["batch"]) for step, row in ready]
    print(json.dumps({"rows": rows, "problems": problems}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=[""], help="entries of these names, or with these in their names")
    parser.add_argument("--specs", nargs="+", default=[], help="any specs in the place of the entries, compiled")
    parser.add_argument("--passes", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 384])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--graphs", action="store_true", help="replay what is compiled as CUDA graphs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.batch, options.passes, options.sizes, options.graphs)
        return

    def prepare(label: str) -> subprocess.Popen:
        command = [sys.executable, __file__, "--one", label, "--batch", str(options.batch), "--passes", *options.passes]
        command += ["--sizes", *map(str, options.sizes), *(["--graphs"] if options.graphs else [])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        print(f"{label} is ready", flush=True)
        return process

    only = options.only
    labels = [
        label for label in ENTRIES if any(label == some or (some not in ENTRIES and some in label) for some in only)
    ]
    labels = options.specs or labels
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
            fast = label not in ENTRIES or ENTRIES[label][2]
            mode = ("graphs" if options.graphs else "compiled") if fast else "eager"
            for row in found["rows"]:
                rows.append({**machine, "model": label, "mode": mode, **row})
                print(
                    f"{label:36s} {row['pass']:9s} {row['size']} B{row['batch']:<4d} {row['images_per_s']:8.0f} img/s "
                    f"({row['p10']:.0f}-{row['p90']:.0f}) {row['peak_gib']:6.2f} GiB",
                    flush=True,
                )
            for problem in found["problems"]:
                print(f"{label:36s} {problem[:200]}", flush=True)
            replace_rows(options.out / "models.csv", rows, ("model", "mode", "pass", "size"))


if __name__ == "__main__":
    main()
