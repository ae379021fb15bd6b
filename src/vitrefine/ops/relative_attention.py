"""Attention over a whole map with a learned bias for each displacement of query against key (LIT's stages 3 and 4).

    O_h = softmax(Q_h K_hᵀ · scale + B_h) V_h,   B_h(i, j) = table_h(row_i − row_j + h − 1, column_i − column_j + w − 1)

The (H, N, N) bias holds N² numbers a head of which only (2h−1)(2w−1) differ: at detection sizes, N ≈ 4,200, it is
larger than everything else in the layer. `impl="reference"` builds it and is the specification; `impl="triton"` reads
the table where a score needs it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.choice import AMPERE, HALF, demand_gpu, exported_for_any, runs_kernels

IMPLEMENTATIONS = ("auto", "reference", "triton")
# Where there is less to do than either, launching the kernels takes longer than building the bias.
FEWEST_TOKENS, FEWEST_PAIRS = 512, 1 << 22  # benchmarks/relative_attention.py


def spread_table(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """The (H, N, N) bias out of a (H, 2h-1, 2w-1) table."""
    height, width = grid
    row = torch.arange(height, device=table.device)
    column = torch.arange(width, device=table.device)
    down = row[:, None] - row + height - 1
    right = column[:, None] - column + width - 1
    bias = table[:, down[:, None, :, None], right[None, :, None, :]]
    return bias.reshape(-1, height * width, height * width)


def _worth_it(q: Tensor) -> bool:
    batch, heads, tokens, _ = q.shape
    return tokens >= FEWEST_TOKENS or (not exported_for_any(batch) and batch * heads * tokens**2 >= FEWEST_PAIRS)


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    grid: tuple[int, int],
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of every token of a map to every token, biased by their displacement.

    Args:
        q: Queries, (B, H, N, d), N = h·w.
        k: Keys, (B, H, N, d).
        v: Values, (B, H, N, d).
        table: Bias of each head and displacement, (H, 2h-1, 2w-1).
        grid: Height and width of the map.
        scale: Factor of the scores; d^-½ if None.
        impl: `reference`, `triton`, or `auto`: the kernel on a GPU where it applies and there is enough to do.

    Returns:
        (B, H, N, d).
    """
    check_choice("implementation", impl, IMPLEMENTATIONS)
    height, width = grid
    expected = (q.shape[1], 2 * height - 1, 2 * width - 1)
    if q.shape[2] != height * width or tuple(table.shape) != expected:
        raise UserError(
            f"{q.shape[2]} tokens and a table of {tuple(table.shape)} do not make a {height}×{width} map; "
            f"give {height * width} tokens and a table of {expected}"
        )
    if impl == "auto":
        served = q.dtype in (*HALF, torch.float32) and q.shape[-1] <= 128 and runs_kernels(q, AMPERE)
        impl = "triton" if served and _worth_it(q) else "reference"
    if impl == "triton":
        demand_gpu(q, "reference")
        from vitrefine.ops.kernels.relative_attention_op import relative_attention_triton

        return relative_attention_triton(q, k, v, table, width, scale=scale)
    bias = spread_table(table, grid).to(q.dtype)[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
