"""Tries other tiles, one kernel of refined attention at a time: how `refined_attention_plan.TILES` was found.

    python benchmarks/tune_refined_attention.py [--dim 64] [--tokens 197] [--batch 128]

Candidates are compiled by several processes at once, into Triton's cache, then timed one after the other as CUDA
graphs: forward, and forward + backward, against the tiles in use.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from measure import as_graph
from torch import Tensor

from vitrefine.ops.kernels import refined_attention_plan as plan
from vitrefine.ops.kernels import refined_attention_triton
from vitrefine.ops.kernels.launch import forget
from vitrefine.ops.kernels.refined_attention_plan import Tile, tiles_for

HEADS = 12
CANDIDATES = {
    "norm": [Tile(64, 256, 4), Tile(64, 128, 4), Tile(128, 128, 8), Tile(64, 256, 8), Tile(64, 64, 4, 2)],
    "maps": [Tile(32, 16, 4), Tile(32, 16, 4, 2), Tile(32, 16, 8), Tile(32, 16, 8, 2), Tile(16, 16, 4)],
    "aggregate": [
        Tile(32, 16, 8, 3), Tile(64, 16, 8, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4), Tile(32, 16, 8, 2),
        Tile(32, 16, 8), Tile(16, 16, 8, 2), Tile(64, 16, 8),
    ],
    "maps_backward": [
        Tile(16, 16, 4, 2), Tile(16, 16, 4), Tile(32, 16, 8), Tile(16, 16, 8), Tile(16, 16, 4, 2, 168),
        Tile(16, 16, 4, 2, 128),
    ],
    "grad_mix": [Tile(16, 32, 4, 3), Tile(32, 16, 4, 3), Tile(16, 16, 4, 4)],
    "grad_scores": [
        Tile(16, 16, 4, 2), Tile(16, 16, 4, 3), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 3),
        Tile(16, 16, 4), Tile(16, 32, 8, 2),
    ],
    "grad_keys": [
        Tile(16, 16, 4), Tile(16, 16, 4, 1, 168), Tile(16, 16, 8), Tile(32, 16, 8), Tile(16, 32, 8),
        Tile(16, 16, 8, 1, 80),
    ],
    "grad_values": [
        Tile(16, 16, 4, 2), Tile(32, 16, 8, 2), Tile(16, 16, 4), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2),
        Tile(16, 16, 4, 3),
    ],
}  # fmt: skip
FORWARD = ("norm", "maps", "aggregate")


def draw(batch: int, tokens: int, dim: int) -> tuple[list[Tensor], Tensor]:
    shape = (batch, HEADS, tokens, dim)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves.append(0.1 * torch.randn(HEADS, HEADS, 3, 3, device="cuda"))
    return [leaf.requires_grad_() for leaf in leaves], torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def use(tokens: int, dim: int, name: str, tile: Tile) -> Tile:
    """Put a tile into the table; returns the one that was there."""
    tiles = tiles_for(16, plan.padded(dim), 2, masked=False)
    before, tiles[name] = tiles[name], tile
    forget()
    return before


def compile_one(tokens: int, dim: int, name: str, tile: Tile) -> str:
    before = use(tokens, dim, name, tile)
    leaves, grad = draw(2, tokens, dim)
    try:
        torch.autograd.grad(refined_attention_triton(*leaves), leaves, grad)
        torch.cuda.synchronize()
    except Exception as problem:  # a tile that does not fit is an answer too
        return type(problem).__name__
    finally:
        use(tokens, dim, name, before)
    return ""


def median(step: Callable[[], object]) -> float:
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(25)]
    for _ in range(3):
        step()
    for before, after in marks:
        before.record()
        step()
        after.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in marks)[12]


def times(leaves: list[Tensor], grad: Tensor) -> tuple[float, float]:
    def forward() -> None:
        with torch.no_grad():
            refined_attention_triton(*leaves)

    def both() -> None:
        torch.autograd.grad(refined_attention_triton(*leaves), leaves, grad)

    return median(as_graph(forward)), median(as_graph(both))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--kernels", default=",".join(CANDIDATES))
    options = parser.parse_args()
    jobs = [(name, tile) for name in options.kernels.split(",") for tile in CANDIDATES[name]]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, options.tokens, options.dim, *job) for job in jobs]
        problems = [future.result() for future in futures]
    leaves, grad = draw(options.batch, options.tokens, options.dim)
    print(f"B{options.batch} H{HEADS} N{options.tokens} d{options.dim}: forward | forward + backward, ms in a graph")
    print(f"{'in use':40s} {'{:.4f} | {:.4f}'.format(*times(leaves, grad))}", flush=True)
    for (name, tile), problem in zip(jobs, problems, strict=True):
        what = f"{name} {tuple(tile)}"
        if problem:
            print(f"{what:40s} {problem}")
            continue
        before = use(options.tokens, options.dim, name, tile)
        forward, both = times(leaves, grad)
        print(f"{what:40s} {forward:.4f} | {both:.4f}" if name in FORWARD else f"{what:40s}        | {both:.4f}")
        use(options.tokens, options.dim, name, before)
    print(f"{'in use':40s} {'{:.4f} | {:.4f}'.format(*times(leaves, grad))}")
    for least in (84, 128, 192, 256, 512):
        plan.LEAST_BYTES = least << 20
        print(f"{f'scratch {least} MiB':40s} {'{:.4f} | {:.4f}'.format(*times(leaves, grad))}", flush=True)


if __name__ == "__main__":
    main()
