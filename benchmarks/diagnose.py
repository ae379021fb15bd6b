"""What `diagnose` adds to a forward pass, and how much memory it takes where maps would be large.

    python benchmarks/diagnose.py [--out benchmarks/results]

A ViT-S/16 at 224 pixels, 128 images: the forward pass alone; with everything that `vitrefine diagnose` measures; with
the statistics of attention alone; and with hooks that have whole maps, as other tools do it, fused attention turned
off. Entries take turns, so that a busy host or a warm clock is shared by all; times are wall clock, the device waited
for. Then one block at 16,384 tokens with its peak memory, and the kernels by themselves beside the same in PyTorch.
Without a GPU everything is tiny and nothing is written. Writes results/diagnose.csv.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
import triton
from measure import RESULTS, write
from torch import Tensor, nn

from vitrefine.diagnose.attention import prefix_tokens_of
from vitrefine.diagnose.capture import capture
from vitrefine.diagnose.collect import AttentionCollector
from vitrefine.diagnose.grid import TokenGrid
from vitrefine.diagnose.measures import head_similarity, relative_distance, row_entropy, softmax_gradient
from vitrefine.diagnose.watching import watching
from vitrefine.ops.attention_statistics import attention_statistics

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
IMAGES, SIZE, DEPTH, LONG = (128, 224, 12, 2048) if ON_GPU else (4, 64, 2, 128)
ROUNDS = 7 if ON_GPU else 2
GIB = 1 << 30
Step = Callable[[], object]
Row = dict[str, object]


def model_of(size: int, depth: int, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_small_patch16_224", img_size=size, depth=depth, **options).to(DEVICE).eval()


def whole_maps(model: nn.Module, grid: TokenGrid) -> list[Callable[[], None]]:
    """Hooks that measure the maps of attention that is not fused; gives what takes them off again."""
    places = grid.coordinates().to(DEVICE)
    found: list[Tensor] = []

    def measure(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        maps = args[0].float()
        found[:] = [row_entropy(maps), relative_distance(maps, places), softmax_gradient(maps), head_similarity(maps)]

    undo = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
        undo.append(block.attn.attn_drop.register_forward_pre_hook(measure).remove)
        undo.append(lambda attn=block.attn: setattr(attn, "fused_attn", True))
    return undo


@contextlib.contextmanager
def plain(model: nn.Module, images: Tensor) -> Iterator[Step]:
    yield lambda: model(images)


@contextlib.contextmanager
def everything(model: nn.Module, images: Tensor) -> Iterator[Step]:
    with watching(model) as watched:
        yield lambda: watched.run(images)


@contextlib.contextmanager
def attention_alone(model: nn.Module, images: Tensor) -> Iterator[Step]:
    collector = AttentionCollector(prefix_tokens_of(model))

    def run() -> None:
        collector.begin(images)
        model(images)
        collector.finish()

    with capture(model, on_call=collector.on_call):
        yield run


@contextlib.contextmanager
def hooks(model: nn.Module, images: Tensor) -> Iterator[Step]:
    side = images.shape[-1] // 16
    undo = whole_maps(model, TokenGrid(model.num_prefix_tokens, side, side))  # type: ignore[arg-type]
    try:
        yield lambda: model(images)
    finally:
        for step in undo:
            step()


WAYS = {
    "forward pass": plain,
    "diagnose": everything,
    "attention statistics alone": attention_alone,
    "hooks on whole maps": hooks,
}


def seconds(step: Step, times: int = 1) -> float:
    """A step's share of several in a row, which the device need not wait for."""
    start = time.perf_counter()
    for _ in range(times):
        step()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def row(case: str, name: str, kind: str, times: list[float], peak: float = 0, note: str = "") -> Row:
    low, *_, high = statistics.quantiles(times, n=10)
    middle = statistics.median(times)
    print(f"{case:24s} {name:36s} {kind:9s} {1e3 * middle:9.3f} ms {peak / GIB:8.2f} GiB  {note}", flush=True)
    return {
        "gpu": torch.cuda.get_device_name() if ON_GPU else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "case": case,
        "implementation": name,
        "dtype": kind,
        "pass": "forward",
        "mode": "eager",
        "median_ms": round(1e3 * middle, 4),
        "p10_ms": round(1e3 * low, 4),
        "p90_ms": round(1e3 * high, 4),
        "peak_mib": round(peak / 2**20),
        "note": note,
    }


def autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=kind == "bfloat16")


@torch.no_grad()
def overheads(case: str, model: nn.Module, images: Tensor, kind: str, rounds: int) -> list[Row]:
    """Every way of looking beside the forward pass alone: time, and the peak memory beyond weights and images."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks = dict.fromkeys(WAYS, 0.0)
    refused: dict[str, str] = {}
    with autocast(kind):
        for number in range(rounds + 1):  # the first compiles kernels and fills caches
            for name, way in WAYS.items():
                if name in refused:
                    continue
                before = 0
                if ON_GPU:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                try:
                    with way(model, images) as step:
                        seconds(step)
                        took = seconds(step, times=3)
                except torch.OutOfMemoryError as error:
                    refused[name] = str(error).split(".")[0]
                    continue
                if number:
                    times[name].append(took)
                if ON_GPU:
                    peaks[name] = torch.cuda.max_memory_allocated() - before
    rows = []
    alone = statistics.median(times["forward pass"])
    for name in WAYS:
        if name in refused:
            rows.append(row(case, name, kind, [float("nan")] * 2, note=refused[name]))
            continue
        more = statistics.median(times[name]) / alone - 1
        rows.append(row(case, name, kind, times[name], peaks[name], f"{100 * more:+.1f} %"))
    return rows


@torch.no_grad()
def compiled(case: str, model: nn.Module, images: Tensor, kind: str) -> Row:
    run = torch.compile(model)
    with autocast(kind):
        times = [seconds(lambda: run(images)) for _ in range(ROUNDS + 3)][3:]
    return row(case, "forward pass, compiled", kind, times, note="diagnose runs a compiled model uncompiled")


def eager_statistics(q: Tensor, k: Tensor, places: Tensor) -> list[Tensor]:
    maps = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    return [row_entropy(maps), maps.square().sum(dim=-1), head_similarity(maps), relative_distance(maps, places)]


@torch.no_grad()
def kernels(images: int, side: int, kind: torch.dtype) -> list[Row]:
    """The statistics of one attention, by kernels, by tiles and from whole maps; how far these are apart."""
    heads, tokens = 6, 1 + side**2
    q, k, _ = torch.randn(images, tokens, 3, heads, 64, device=DEVICE, dtype=kind).permute(2, 0, 3, 1, 4)
    places = TokenGrid(1, side, side).coordinates().to(DEVICE)
    case, name = f"B{images} H{heads} N{tokens} d64", str(kind).removeprefix("torch.")
    ways: dict[str, Step] = {"reference": lambda: attention_statistics(q, k, coordinates=places, impl="reference")}
    note = ""
    if ON_GPU:
        ways["triton"] = lambda: attention_statistics(q, k, coordinates=places, impl="triton")
        exact = attention_statistics(q[:4].double(), k[:4].double(), coordinates=places, impl="reference")
        found = attention_statistics(q[:4], k[:4], coordinates=places, impl="triton")
        apart = [(a - b).nan_to_num().abs().max().item() for a, b in zip(found[:4], exact[:4], strict=True)]  # type: ignore[operator]
        note = f"off by {max(apart):.1e} at most"
    ways["whole maps"] = lambda: eager_statistics(q, k, places)
    rows = []
    for way, step in ways.items():
        times = [seconds(step) for _ in range(ROUNDS + 2)][2:]
        if ON_GPU:
            times = [time / 1e3 for time in triton.testing.do_bench(step, rep=40, return_mode="all")]
        rows.append(row(case, way, name, times, note=note if way == "triton" else ""))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [found for kind in (torch.bfloat16, torch.float32) for found in kernels(IMAGES, SIZE // 16, kind)]
    model, images = model_of(SIZE, DEPTH), torch.randn(IMAGES, 3, SIZE, SIZE, device=DEVICE)
    case = f"ViT-S B{IMAGES} N{1 + (SIZE // 16) ** 2}"
    for kind in ("bfloat16", "float32"):
        rows += overheads(case, model, images, kind, ROUNDS)
    if ON_GPU:
        rows.append(compiled(case, model, images, "bfloat16"))
    del model, images
    long = model_of(LONG, 1, class_token=False, global_pool="avg")
    image = torch.randn(1, 3, LONG, LONG, device=DEVICE)
    for kind in ("bfloat16", "float32"):
        rows += overheads(f"one block, N{(LONG // 16) ** 2}", long, image, kind, 3)
    if ON_GPU:
        write("diagnose", rows, options.out)


if __name__ == "__main__":
    main()
