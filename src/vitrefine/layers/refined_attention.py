"""Self-attention with refined maps that later blocks may share: paper form, and the authors' form.

Paper (Refiner, Fig. 3b and Table 13): a block refines its maps and hands them to the next n blocks, which have only
values of their own. Authors' code, d the head width and A_prev the maps handed on:

    own maps      A = softmax(QKᵀ/√d) + d^-½ A_prev,  A ← BN(DLA(A)) only with `refine_own`;  hands A on
    shared maps   R = d^-½ BN(DLA(A_prev)), values by a linear layer of their own;            hands A_prev on
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.layers.attention import split_heads
from vitrefine.layers.official_inference import refine_officially
from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.refiner import Refiner
from vitrefine.ops.refined_attention import aggregate, attention_maps, refined_attention, refined_attention_and_maps


class _MapSharingAttention(nn.Module):
    """What both forms have: projections, with queries and keys only where the maps are not another block's."""

    in_the_open = False  # a graft that changes or watches attention must see it, which in a kernel of ours it cannot

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        shared: bool,
        out_heads: int,
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.shared, self.attn_drop = num_heads, shared, attn_drop
        if shared:
            self.v = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        else:
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.proj = nn.Linear(dim // num_heads * out_heads, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))

    def _project(self, heads: Tensor) -> Tensor:
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    @property
    def _dropout_p(self) -> float:
        return self.attn_drop if self.training else 0.0


class RefinedAttention(_MapSharingAttention):
    """Attention of the paper's equations.

    Args:
        dim: Width of the tokens.
        num_heads: Heads that attend.
        shared: Use the maps of the block before; there are then no queries, keys or refiner here.
        hands_on: Return the refined maps, for the next block to share. Off, they need never exist as a whole.
        expansion, kernel_size, reduction, constraint: See `Refiner`.
        qkv_bias: Bias of queries, keys and values.
        attn_drop: Dropout of the maps.
        proj_drop: Dropout of the output.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        shared: bool = False,
        hands_on: bool = False,
        expansion: float = 3,
        kernel_size: int = 3,
        reduction: bool = True,
        constraint: str = "none",
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        refiner = Refiner(
            num_heads,
            expansion=expansion,
            kernel_size=kernel_size,
            reduction=reduction,
            constraint=constraint,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            dim,
            num_heads,
            shared=shared,
            out_heads=refiner.out_heads,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            device=device,
            dtype=dtype,
        )
        self.hands_on = hands_on
        if not shared:
            self.refiner = refiner

    def forward(
        self,
        x: Tensor,
        maps: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: Tokens, (B, N, C).
            maps: Refined maps of the block before; needed, and used, only where `shared`.
            attn_mask: Boolean (True: visible) or additive, broadcastable to (B, H, N, N).
            grid: Height and width of the grid of patches, for `constraint="spatial"`.

        Returns:
            Tokens (B, N, C), and the maps for the next block.
        """
        if self.shared:
            assert maps is not None, "a block that shares maps needs those of the block before"
            v = split_heads(self.v(x), self.num_heads)
            return self._project(aggregate(maps, v, dropout_p=self._dropout_p)), maps
        q, k, v = self._qkv(x)
        mix, grid = self.refiner.mix(), self.refiner.grid(grid)
        options: dict[str, Any] = {"attn_mask": attn_mask, "grid": grid, "dropout_p": self._dropout_p}
        if self.in_the_open:
            options["impl"] = "collapsed"
        if not self.hands_on:
            return self._project(refined_attention(q, k, v, mix, **options)), None
        heads, maps = refined_attention_and_maps(q, k, v, mix, **options)
        return self._project(heads), maps


class OfficialRefinedAttention(_MapSharingAttention):
    """Attention of the authors' code.

    Args:
        dim: Width of the tokens.
        num_heads: Heads that attend.
        shared: Refine the maps handed on by the block before instead of own ones.
        refine_own: Refine own maps too; the authors' S, M and L models do not.
        expansion: Ratio of the refiner of own maps; the refiner of shared maps always has 3.
        qkv_bias: Bias of queries, keys and values.
        attn_drop: Dropout of the maps.
        proj_drop: Dropout of the output.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        shared: bool = False,
        refine_own: bool = False,
        expansion: float = 3,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            shared=shared,
            out_heads=num_heads,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            device=device,
            dtype=dtype,
        )
        self.scale = (dim // num_heads) ** -0.5
        self.refiner: nn.Sequential | None = None
        if shared or refine_own:
            self.refiner = nn.Sequential(
                OfficialRefiner(num_heads, expansion=3 if shared else expansion, device=device, dtype=dtype),
                nn.BatchNorm2d(num_heads, device=device, dtype=dtype),
            )

    def forward(self, x: Tensor, maps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend; `maps` are those handed on by the block before. Returns tokens, and the maps to hand on."""
        if self.shared:
            assert maps is not None, "a block that shares maps needs those of the block before"
            assert self.refiner is not None
            used, v = refine_officially(maps, self.refiner, self.scale), split_heads(self.v(x), self.num_heads)
            return self._project(aggregate(used, v, dropout_p=self._dropout_p)), maps
        q, k, v = self._qkv(x)
        own = attention_maps(q, k)
        if maps is not None:
            own = own + self.scale * maps
        if self.refiner is not None:
            own = refine_officially(own, self.refiner)
        return self._project(aggregate(own, v, dropout_p=self._dropout_p)), own
