"""The refiner of the Refiner authors' code (`variant="official"`): batch norms, ReLU6 and a residual.

    DLA(A) = A + BN(R relu6(BN(w ⊛ relu6(BN(E A)))))

without biases; ratio 1 has no expansion layer. Mode "conv" of that code, `dense` here, is one dense convolution and
nothing else.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.ops.refined_attention import convolve_maps


class OfficialRefiner(nn.Module):
    """Expansion, depthwise convolution and reduction of attention maps, each normalised.

    Args:
        num_heads: Maps that come in and go out.
        expansion: Ratio of maps in between.
        kernel_size: Side of the depthwise kernel.
        dense: One dense convolution over all heads instead.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        expansion: float = 3,
        kernel_size: int = 3,
        dense: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dense = dense
        hidden = round(num_heads * expansion)
        if hidden < 1:
            raise UserError(f"expansion={expansion} leaves no maps to convolve; 3 is the authors'")
        self.local = nn.Conv2d(
            num_heads if dense else hidden,
            num_heads if dense else hidden,
            kernel_size,
            groups=1 if dense else hidden,
            bias=False,
            **factory,
        )
        if dense:
            return
        self.expand: nn.Module = nn.Identity()
        if hidden != num_heads:
            self.expand = nn.Sequential(
                nn.Conv2d(num_heads, hidden, 1, bias=False, **factory), nn.BatchNorm2d(hidden, **factory), nn.ReLU6()
            )
        self.local_norm = nn.BatchNorm2d(hidden, **factory)
        self.reduce = nn.Conv2d(hidden, num_heads, 1, bias=False, **factory)
        self.reduce_norm = nn.BatchNorm2d(num_heads, **factory)

    def forward(self, maps: Tensor) -> Tensor:
        """Refine (B, H, N, N) maps."""
        if self.dense:
            return convolve_maps(maps, self.local.weight)
        refined = convolve_maps(self.expand(maps), self.local.weight, groups=self.local.groups)
        return maps + self.reduce_norm(self.reduce(F.relu6(self.local_norm(refined))))
