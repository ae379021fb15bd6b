"""Refined attention on a CPU, forward+backward: three convolutions against ways to apply the folded one.

`python benchmarks/cpu_refined_attention.py`: B8 N197 H12 d32, expansion 3, 3×3, two threads. Contenders take turns, so
that a busy machine slows them all. Beside wall time stands the processor time of all threads, which a busy machine
hardly changes.
"""

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.ops.refined_attention import Mix, attention_maps, refine_maps, refine_maps_collapsed

RESULTS = Path(__file__).parent / "results"


def three_convolutions(maps: Tensor, mix: Mix) -> Tensor:
    assert mix.expand is not None
    assert mix.local is not None
    assert mix.reduce is not None
    maps = F.conv2d(maps, mix.expand[..., None, None])
    maps = F.conv2d(maps, mix.local[:, None], padding=1, groups=maps.shape[1])
    return F.conv2d(maps, mix.reduce[..., None, None])


def channels_last(maps: Tensor, mix: Mix) -> Tensor:
    kernel = mix.fold().contiguous(memory_format=torch.channels_last)
    return F.conv2d(maps.contiguous(memory_format=torch.channels_last), kernel, padding=1)


def channels_last_padded(maps: Tensor, mix: Mix) -> Tensor:
    """Heads filled up to 16, a register's width."""
    heads = maps.shape[1]
    more = -heads % 16
    kernel = F.pad(mix.fold(), (0, 0, 0, 0, 0, more, 0, more)).contiguous(memory_format=torch.channels_last)
    filled = F.pad(maps.permute(0, 2, 3, 1), (0, more)).permute(0, 3, 1, 2)
    return F.conv2d(filled, kernel, padding=1)[:, :heads]


def without_onednn(maps: Tensor, mix: Mix) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        return F.conv2d(maps, mix.fold(), padding=1)


def unfolded(maps: Tensor, mix: Mix) -> Tensor:
    """Windows laid out, one product [H × 9H]."""
    return (mix.fold().flatten(1) @ F.unfold(maps, 3, padding=1)).view_as(maps)


def shifted(maps: Tensor, mix: Mix) -> Tensor:
    """One product [9H × H], nine shifted sums."""
    size = maps.shape[-1]
    heads = maps.shape[1]
    taps = mix.fold().permute(2, 3, 0, 1).reshape(9 * heads, heads) @ maps.flatten(2)
    taps = F.pad(taps.unflatten(1, (9, heads)).unflatten(-1, (size, size)), (1, 1, 1, 1))
    parts = [taps[:, 3 * a + b, :, a : a + size, b : b + size] for a in range(3) for b in range(3)]
    return torch.stack(parts).sum(0)


CONTENDERS: dict[str, Callable[[Tensor, Mix], Tensor]] = {
    "no refinement": lambda maps, mix: maps,
    "reference (einsum, depthwise, einsum)": refine_maps,
    "three convolutions": three_convolutions,
    "collapsed, NCHW": refine_maps_collapsed,
    "collapsed, channels last": channels_last,
    "collapsed, channels last, 16 heads": channels_last_padded,
    "collapsed, without oneDNN": without_onednn,
    "collapsed, unfold + product": unfolded,
    "collapsed, product + shifts": shifted,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 12, 197, 32, requires_grad=True) for _ in range(3))
    mix = Mix(*(torch.randn(*shape, requires_grad=True) for shape in ((36, 12), (36, 3, 3), (12, 36))))
    leaves = [q, k, v, *(w for w in mix if w is not None)]
    upstream = torch.randn_like(q)

    def step(refine: Callable[[Tensor, Mix], Tensor]) -> tuple[Tensor, ...]:
        out = refine(attention_maps(q, k), mix) @ v
        return out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)

    exact = step(refine_maps)
    wall: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    busy: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(options.rounds + 1):
        for name, refine in CONTENDERS.items():
            started, worked = time.perf_counter(), time.process_time()
            results = step(refine)
            if turn:  # the first is a warm-up, and checked
                wall[name].append(1e3 * (time.perf_counter() - started))
                busy[name].append(1e3 * (time.process_time() - worked))
            elif name != "no refinement":
                for ours, theirs in zip(results, exact, strict=True):
                    assert (ours - theirs).norm() < 1e-4 * theirs.norm(), name
    rows = []
    base = {kind: statistics.median(times["three convolutions"]) for kind, times in (("wall", wall), ("busy", busy))}
    for name in CONTENDERS:
        deciles = statistics.quantiles(wall[name], n=10)
        rows.append(
            {
                "processor": platform.processor() or platform.machine(),
                "threads": options.threads,
                "torch": torch.__version__,
                "case": "B8 H12 N197 d32 r3 k3 float32 forward+backward",
                "implementation": name,
                "median_ms": round(statistics.median(wall[name]), 1),
                "p10_ms": round(deciles[0], 1),
                "p90_ms": round(deciles[-1], 1),
                "fastest_ms": round(min(wall[name]), 1),
                "cpu_ms": round(statistics.median(busy[name]), 1),
                "speedup_wall": round(base["wall"] / statistics.median(wall[name]), 2),
                "speedup_cpu": round(base["busy"] / statistics.median(busy[name]), 2),
            }
        )
        row = rows[-1]
        print(
            f"{name:40s} {row['median_ms']:8.1f} ms (fastest {row['fastest_ms']:.1f}, processor {row['cpu_ms']:.1f})  "
            f"{row['speedup_wall']:.2f}× by wall, {row['speedup_cpu']:.2f}× by processor time"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "cpu_refined_attention.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
