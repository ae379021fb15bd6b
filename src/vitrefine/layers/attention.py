"""Attention of the pyramid models: over all tokens (LIT), or over a reduced map of keys (PVT)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.position import Grid, RelativePositionBias
from vitrefine.ops.relative_attention import relative_attention


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H·d) to (B, H, N, d)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class GlobalAttention(nn.Module):
    """Every token attends to every token; with a relative position bias where `grid` is given."""

    in_the_open = False  # a graft that changes or watches attention must see it, which in a kernel of ours it cannot

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid: Grid | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.attn_drop = num_heads, attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.position = None if grid is None else RelativePositionBias(num_heads, grid, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
        dropout_p = self.attn_drop if self.training else 0.0
        if self.position is not None and not dropout_p and not self.in_the_open:
            x = relative_attention(q, k, v, self.position.resized(grid), grid)
        else:
            bias = None if self.position is None else self.position(grid).to(q.dtype)[None]
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class SpatialReductionAttention(nn.Module):
    """PVT: keys and values come from a map `reduction` times smaller on each side."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        reduction: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.reduction, self.attn_drop = num_heads, reduction, attn_drop
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **factory)
        self.sr = nn.Conv2d(dim, dim, reduction, reduction, **factory)
        self.norm = nn.LayerNorm(dim, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if min(grid) < self.reduction:
            raise UserError(
                f"a map of {grid[0]}x{grid[1]} has no keys when it is reduced {self.reduction} times; reduce it less, "
                "or give larger images"
            )
        reduced = self.sr(x.unflatten(1, grid).permute(0, 3, 1, 2))
        k, v = self.kv(self.norm(reduced.flatten(2).transpose(1, 2))).chunk(2, dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in (self.q(x), k, v))
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop if self.training else 0.0)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))
