"""Refined attention on a GPU: our kernels against plain attention and every other way to compute it.

    python benchmarks/refined_attention.py [--shapes 0,1] [--compile 0] [--skip authors]

Prints a table a shape and writes results/refined_attention.csv: milliseconds (median, 10th and 90th percentile) of
forward and of forward + backward as launched from Python, medians as replayed from a CUDA graph, and the memory of a
training step beyond its inputs. bfloat16, expansion 3, a 3×3 kernel. Competitors are compiled at the shapes of
`--compile` alone: it takes long. Liger-Kernel's multi-token attention takes part where it is installed; it convolves
maps too, but causal ones, of scores that it is given.
"""

import argparse
import importlib.util
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from measure import RESULTS, replace_rows
from torch import Tensor

from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.ops.kernels import refined_attention_and_maps_triton, refined_attention_triton
from vitrefine.ops.official_refine import OfficialMix, official_refine
from vitrefine.ops.official_refine_training import Norm, TrainedMix, official_refine_training
from vitrefine.ops.refined_attention import Mix, attention_maps, refined_attention

SHAPES = [(128, 12, 197, 32), (32, 12, 577, 32), (16, 16, 785, 32), (1, 12, 4096, 32), (2, 12, 4096, 64)]
RATIO, SIZE, REPEATS, SECONDS = 3, 3, 50, 0.5
Attention = Callable[[Tensor, Tensor, Tensor, Mix], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def three_steps(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    return refined_attention(q, k, v, Mix(*(w.to(q.dtype) for w in mix)), impl="reference")


def collapsed(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    return refined_attention(q, k, v, Mix(*(w.to(q.dtype) for w in mix)), impl="collapsed")


def heads_innermost(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    """cuDNN's convolution of maps whose heads are padded to 16 and lie innermost."""
    maps = attention_maps(q, k)
    heads = maps.shape[1]
    spare = -heads % 16
    maps = F.pad(maps, (0, 0, 0, 0, 0, spare)).contiguous(memory_format=torch.channels_last)
    kernel = F.pad(mix.fold().to(q.dtype), (0, 0, 0, 0, 0, spare, 0, spare))
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    return F.conv2d(maps, kernel, padding=SIZE // 2)[:, :heads] @ v


def ours(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    return refined_attention_triton(q, k, v, mix.fold())


def ours_keeping_maps(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    return refined_attention_and_maps_triton(q, k, v, mix.fold())[0]


def liger(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
    from liger_kernel.ops.multi_token_attention import LigerMultiTokenAttentionFunction

    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return LigerMultiTokenAttentionFunction.apply(scores, mix.fold().to(q.dtype), None, 1, SIZE // 2) @ v


def authors(heads: int) -> Attention:
    """As trained: batch norms with the statistics of the batch."""
    refiner = OfficialRefiner(heads, expansion=RATIO, kernel_size=SIZE, device="cuda", dtype=torch.bfloat16)

    def attend(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
        return refiner(attention_maps(q, k)) @ v

    return attend


def authors_kernels(heads: int) -> Attention:
    """The same by kernels that keep no expanded maps."""
    refiner = OfficialRefiner(heads, expansion=RATIO, kernel_size=SIZE, device="cuda")
    conv, norm = refiner.expand[0], refiner.expand[1]
    norms = [Norm(n.weight, n.bias, n.eps) for n in (norm, refiner.local_norm, refiner.reduce_norm)]
    weights = [w.flatten(1) for w in (conv.weight, refiner.reduce.weight)]
    trained = TrainedMix(weights[0], norms[0], refiner.local.weight.squeeze(1), norms[1], weights[1], norms[2])

    def attend(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
        return official_refine_training(attention_maps(q, k), trained, impl="triton")[0] @ v

    return attend


def authors_folded(heads: int, impl: str) -> Attention:
    """As used: batch norms folded into the weights; forward only."""
    hidden = RATIO * heads
    shapes = [(hidden, heads), (hidden,), (hidden, SIZE, SIZE), (hidden,), (heads, hidden), (heads,), (heads,)]
    folded = OfficialMix(*(torch.randn(shape, device="cuda") for shape in shapes))

    def attend(q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
        return official_refine(attention_maps(q, k), folded, impl=impl) @ v

    return attend


def events(step: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of many steps, launched one after the other as in a training loop."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for before, after in marks:
        before.record()
        step()
        after.record()
    torch.cuda.synchronize()
    return sorted(before.elapsed_time(after) for before, after in marks)


def timed(step: Callable[[], object]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    repeats = max(10, min(REPEATS, int(SECONDS * 1000 / max(events(step, 1)[0], 0.1))))
    times = events(step, repeats)
    return times[repeats // 2], times[repeats // 10], times[repeats * 9 // 10]


def replayed(step: Callable[[], object]) -> float:
    """Median when no time goes to launching: the steps of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return timed(graph.replay)[0]


def measure(
    attend: Attention, batch: int, heads: int, tokens: int, dim: int, *, backward: bool = True, replay: bool = False
) -> dict[str, float]:
    shape = (batch, heads, tokens, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    hidden = heads * RATIO
    mix = Mix(*(torch.randn(s, device="cuda").mul(0.2).requires_grad_() for s in _weight_shapes(heads, hidden)))
    grad = torch.randn_like(q)
    leaves = [q, k, v] if attend is plain or getattr(attend, "__name__", "") == "attend" else [q, k, v, *mix]

    @torch.no_grad()
    def forward() -> None:
        attend(q, k, v, mix)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, mix), leaves, grad)

    row = dict.fromkeys((f"{what}{part}" for what in ("fwd", "both") for part in ("", "_p10", "_p90", "_graph")), nan)
    row["train_mib"] = nan
    forward()
    row |= dict(zip(("fwd", "fwd_p10", "fwd_p90"), timed(forward), strict=True))
    if not backward:
        return row
    both()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = attend(q, k, v, mix)
    grads = torch.autograd.grad(kept, leaves, grad)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    del kept, grads
    row |= dict(zip(("both", "both_p10", "both_p90"), timed(both), strict=True))
    row["train_mib"] = peak / 2**20
    if replay:  # the others take so long that launching costs them nothing
        row["fwd_graph"], row["both_graph"] = replayed(forward), replayed(both)
    return row


def _weight_shapes(heads: int, hidden: int) -> list[tuple[int, ...]]:
    return [(hidden, heads), (hidden, SIZE, SIZE), (heads, hidden)]


def written(value: object) -> object:
    """Four decimals; nothing where nothing was measured."""
    if not isinstance(value, float):
        return value
    return "" if isnan(value) else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(map(str, range(len(SHAPES)))), help="indices into SHAPES")
    parser.add_argument("--compile", default="0", help="indices of the shapes at which competitors are compiled too")
    parser.add_argument("--skip", default="", help="leave out competitors whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS / "refined_attention.csv")
    options = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for index in map(int, options.shapes.split(",")):
        batch, heads, tokens, dim = SHAPES[index]
        competitors: dict[str, Attention] = {
            "SDPA, no refinement": plain,
            "vitrefine, Triton": ours,
            "vitrefine, Triton, maps kept": ours_keeping_maps,
            "three steps, eager": three_steps,
            "one convolution, eager": collapsed,
            "one convolution, heads innermost": heads_innermost,
            "authors' form, eager": authors(heads),
            "authors' form in training, kernels": authors_kernels(heads),
            "authors', folded, eager": authors_folded(heads, "reference"),
            "authors', folded, Triton": authors_folded(heads, "triton"),
        }
        if importlib.util.find_spec("liger_kernel"):
            competitors["Liger multi-token (causal)"] = liger
        if index in map(int, options.compile.split(",")):
            competitors |= {
                "three steps, compiled": torch.compile(three_steps, dynamic=False),
                "one convolution, compiled": torch.compile(collapsed, dynamic=False),
                "authors' form, compiled": torch.compile(authors(heads), dynamic=False),
            }
        print(f"\nB{batch} H{heads} N{tokens} d{dim}: ms forward | forward + backward (in a graph) | MiB of training")
        for name, attend in competitors.items():
            if options.skip and options.skip in name:
                continue
            try:
                replay = name.startswith(("SDPA", "vitrefine", "authors' form in training"))
                row = measure(attend, batch, heads, tokens, dim, backward="folded" not in name, replay=replay)
            except torch.OutOfMemoryError:
                print(f"{name:34s} out of memory")
                continue
            shape = {"batch": batch, "heads": heads, "tokens": tokens, "dim": dim}
            figures = {column: written(value) for column, value in row.items()}
            replace_rows(options.out, [{**shape, "name": name, **figures, **machine}], (*shape, "name"))
            print(
                f"{name:34s} {row['fwd']:8.3f} ({row['fwd_graph']:.3f}) | {row['both']:8.3f} ({row['both_graph']:.3f})"
                f" | {row['train_mib']:6.0f}".replace("(nan)", "").replace("nan", ""),
                flush=True,
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
