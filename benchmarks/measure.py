"""Timing for the scripts beside it: medians with percentiles, eager and as a replayed CUDA graph, and CSV files."""

import csv
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import triton
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "gpu", "torch", "triton", "case", "implementation", "dtype", "pass", "mode", "median_ms", "p10_ms", "p90_ms",
    "peak_mib", "note",
)  # fmt: skip


def percentiles(call: Callable[[], object], *, milliseconds: int = 40) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of a call, the cache emptied before each."""
    return triton.testing.do_bench(call, warmup=10, rep=milliseconds, quantiles=[0.5, 0.1, 0.9])


def as_graph(call: Callable[[], object]) -> Callable[[], None]:
    """The same kernels without the host: what a captured or well-fed training step sees."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_mib(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    case: str, name: str, call: Callable[[], Tensor], inputs: list[Tensor], upstream: Tensor, *, note: str = ""
) -> list[dict[str, object]]:
    """Rows of a table: forward, and forward with backward to all inputs that want gradients; eager, and as a graph."""
    wanted = [t for t in inputs if t.requires_grad]

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(), wanted, upstream)

    once, again = both(), both()
    repeatable = all(a.equal(b) for a, b in zip(once, again, strict=True))
    del once, again
    rows = []
    for what, work in (("forward", forward), ("forward+backward", both)):
        peak = peak_mib(work)
        for mode in ("eager", "graph"):
            said = note
            try:
                median, p10, p90 = percentiles(work if mode == "eager" else as_graph(work))
            except RuntimeError as error:
                median = p10 = p90 = float("nan")
                said = str(error).splitlines()[0]
            if what == "forward+backward":
                said = f"{said} {'bitwise repeatable' if repeatable else 'not repeatable'}".strip()
            rows.append(
                {
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "case": case,
                    "implementation": name,
                    "dtype": str(upstream.dtype).removeprefix("torch."),
                    "pass": what,
                    "mode": mode,
                    "median_ms": round(median, 4),
                    "p10_ms": round(p10, 4),
                    "p90_ms": round(p90, 4),
                    "peak_mib": round(peak),
                    "note": said,
                }
            )
    times = " / ".join(f"{row['median_ms']:.3f}" for row in rows)
    print(f"{case:28s} {name:24s} {times}   {rows[-1]['peak_mib']} MiB  {rows[-1]['note']}", flush=True)
    return rows


def write(name: str, rows: Iterable[dict[str, object]], folder: Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        table.writerows(rows)
    print(f"{folder / name}.csv on {platform.machine()}, {torch.cuda.get_device_name()}")


def replace_rows(path: Path, rows: list[dict[str, object]], kind: tuple[str, ...]) -> None:
    """Add rows to a CSV file in the place of older ones of their kind, by the columns that tell one kind from another.

    Called after each measurement, so that a run that is stopped loses nothing.
    """
    older: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            older = list(csv.DictReader(file))
    table = {tuple(str(row[column]) for column in kind): row for row in [*older, *rows]}
    if not table:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list((older or rows)[0]))
        writer.writeheader()
        writer.writerows(table.values())
