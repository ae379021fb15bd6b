"""Attention with a relative position bias at LIT-S's detection and classification sizes, and DLA through SDPA.

`python benchmarks/relative_attention.py`. Columns, ms: forward eager / as a graph / with backward eager / as a graph.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import RESULTS, measure, write
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from vitrefine.ops.local_attention import local_attention
from vitrefine.ops.refined_attention import Mix, refined_attention
from vitrefine.ops.relative_attention import relative_attention, spread_table

CASES = ((2, 12, (50, 84)), (2, 24, (25, 42)), (128, 12, (14, 14)))  # images, heads, map; 32 channels a head


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def relative(images: int, heads: int, grid: tuple[int, int]) -> list[dict[str, object]]:
    height, width = grid
    tokens = height * width
    q, k, v = (draw(images, heads, tokens, 32) for _ in range(3))
    table = draw(heads, 2 * height - 1, 2 * width - 1, dtype=torch.float32)
    upstream = torch.randn_like(q)
    case = f"B{images} H{heads} {height}x{width} d32"

    def biased(score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        down, right = query // width - key // width, query % width - key % width
        return score + table[head, down + height - 1, right + width - 1]

    bias = spread_table(table.detach(), grid).to(q.dtype)[None].requires_grad_()
    flex = torch.compile(flex_attention, dynamic=False)
    attend = F.scaled_dot_product_attention
    rows = measure(case, "SDPA without bias", lambda: attend(q, k, v), [q, k, v], upstream)
    rows += measure(case, "SDPA, N×N bias given", lambda: attend(q, k, v, bias), [q, k, v, bias], upstream)
    both = [q, k, v, table]
    for impl in ("reference", "triton"):
        rows += measure(
            case, impl, lambda impl=impl: relative_attention(q, k, v, table, grid, impl=impl), both, upstream
        )
    if tokens < 1000:
        return rows
    return rows + measure(case, "FlexAttention", lambda: flex(q, k, v, score_mod=biased), both, upstream)


def local(images: int, heads: int, tokens: int) -> list[dict[str, object]]:
    q, k, v = (draw(images, heads, tokens, 32) for _ in range(3))
    kernel, upstream = draw(heads, 3, 3), torch.randn_like(q)
    case = f"DLA 3x3 B{images} H{heads} N{tokens}"
    inputs = [q, k, v, kernel]
    rows = measure(case, "SDPA, no DLA", lambda: F.scaled_dot_product_attention(q, k, v), inputs[:3], upstream)
    mix = Mix(local=kernel)
    rows += measure(case, "reference", lambda: refined_attention(q, k, v, mix, impl="reference"), inputs, upstream)
    return rows + measure(case, "sdpa", lambda: local_attention(q, k, v, kernel), inputs, upstream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [row for case in CASES for row in relative(*case)]
    rows += local(128, 12, 197) + local(16, 16, 785)
    write("relative_attention", rows, options.out)


if __name__ == "__main__":
    main()
