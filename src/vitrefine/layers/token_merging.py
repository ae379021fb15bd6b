"""Merging 2×2 tokens into one between the stages of a pyramid: deformable (LIT, Eqn. 8) or uniform.

    DTM(X) = GELU(BN(DC(X)))

DC is a deformable convolution, kernel = stride = 2, whose offsets come from a 2×2 convolution of the same map and
start at zero, so that merging starts uniform. The offsets want a small learning rate: `offset_param_groups`.
All of these take and give NHWC.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.ops.deformable_merge import deformable_merge

KERNEL_SIZE = 2


class OffsetConvolution(nn.Conv2d):
    """Says where the taps of a merging layer are read; starts at zero, so that merging starts uniform."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class DeformableTokenMerging(nn.Module):
    """DTM: tokens are read where learned offsets point, then merged."""

    def __init__(
        self,
        dim: int,
        out_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.offset = OffsetConvolution(dim, 2 * KERNEL_SIZE**2, KERNEL_SIZE, KERNEL_SIZE, **factory)
        self.merge = nn.Conv2d(dim, out_dim, KERNEL_SIZE, KERNEL_SIZE, **factory)
        self.norm = nn.BatchNorm2d(out_dim, **factory)

    def reset_parameters(self) -> None:
        """Return to zero offsets: uniform merging."""
        self.offset.reset_parameters()

    def sampling_offsets(self, x: Tensor) -> Tensor:
        """(B, 8, H/2, W/2): dy, dx of each of the four taps, in tokens of the map that comes in."""
        return self.offset(x.permute(0, 3, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = deformable_merge(x, self.sampling_offsets(x), self.merge.weight, self.merge.bias)
        return F.gelu(self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class UniformTokenMerging(nn.Module):
    """A 2×2 convolution and layer norm: PVT's patch embedding, LIT-Ti*."""

    def __init__(
        self,
        dim: int,
        out_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.merge = nn.Conv2d(dim, out_dim, KERNEL_SIZE, KERNEL_SIZE, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(out_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.merge(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def offset_param_groups(
    model: nn.Module, *, lr_scale: float = 0.01, param_groups: Iterable[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Optimiser groups in which offsets learn at `lr_scale` of the rate (LIT: 1e-5 beside 1e-3).

    Args:
        model: Any model; where nothing in it merges deformably its groups come back as they are.
        lr_scale: Share of the learning rate; timm's optimisers and schedulers read the key `lr_scale`.
        param_groups: Groups to split further, from timm's weight-decay or layer-decay grouping, say.

    Returns:
        The groups, those with offsets split in two.
    """
    offsets = {id(p) for m in model.modules() if isinstance(m, OffsetConvolution) for p in m.parameters()}
    if param_groups is None:
        param_groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    split: list[dict[str, Any]] = []
    for group in param_groups:
        own = [p for p in group["params"] if id(p) not in offsets]
        moved = [p for p in group["params"] if id(p) in offsets]
        if own:
            split.append({**group, "params": own})
        if moved:
            split.append({**group, "params": moved, "lr_scale": group.get("lr_scale", 1.0) * lr_scale})
    return split
