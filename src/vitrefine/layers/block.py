"""The block of a pyramid stage: LIT's MLP block, or a pre-norm Transformer block (LIT, Eqns. 1-3)."""

from typing import Any

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from vitrefine.layers.position import Grid


class PyramidBlock(nn.Module):
    """X + Attn(LN(X)), where there is attention, then X + MLP(LN(X)).

    The norm of the MLP is `norm2` in both kinds, so weights keep their names when attention is taken out.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module | None,
        *,
        mlp_ratio: float,
        norm_eps: float,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attn = attn
        self.norm1 = None if attn is None else nn.LayerNorm(dim, eps=norm_eps, **factory)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, **factory)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, **factory)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if self.attn is not None and self.norm1 is not None:
            x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))
