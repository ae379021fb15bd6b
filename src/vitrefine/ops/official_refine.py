"""The Refiner authors' refinement of maps, for inference: batch norms folded into the weights around them.

    A ↦ s ⊙ A + R relu6(w ⊛ relu6(E A + b₁) + b₂) + b₃

with E (H', H), w one 3×3 kernel a map and R (H, H'); zeros surround what is convolved. `impl="reference"` is the
specification; `impl="triton"` keeps the H' maps in registers. In training the norms take statistics of whole maps:
`official_refine_training`.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import check_choice
from vitrefine.ops.choice import AMPERE, HALF, computes_in, demand_gpu, runs_kernels

IMPLEMENTATIONS = ("auto", "reference", "triton")
MOST_HEADS, MOST_HIDDEN = 32, 128


class OfficialMix(NamedTuple):
    """Folded weights; without `expand` the maps that are convolved are those that come in."""

    expand: Tensor | None  # (H', H)
    expand_bias: Tensor | None  # (H',)
    local: Tensor  # (H', 3, 3)
    local_bias: Tensor  # (H',)
    reduce: Tensor  # (H, H')
    reduce_bias: Tensor  # (H,)
    residual: Tensor  # (H,), the factor s


def kernel_serves(maps: Tensor, hidden: int) -> bool:
    """Whether the kernel takes these maps."""
    small = maps.shape[1] <= MOST_HEADS and hidden <= MOST_HIDDEN
    return small and computes_in(maps) in HALF and runs_kernels(maps, AMPERE)


def official_refine(maps: Tensor, mix: OfficialMix, *, impl: str = "auto") -> Tensor:
    """Refine (B, H, Nq, Nk) maps; no gradients.

    Args:
        maps: What comes in.
        mix: Weights, in any floating-point type.
        impl: `reference`, `triton`, or `auto`: the kernel on a GPU in half precision.
    """
    check_choice("implementation", impl, IMPLEMENTATIONS)
    if impl == "triton":
        demand_gpu(maps, "reference")
    if impl == "triton" or (impl == "auto" and kernel_serves(maps, mix.local.shape[0])):
        from vitrefine.ops.kernels.official_refine import official_refine_triton

        return official_refine_triton(maps, mix)
    local, local_bias, reduce, reduce_bias, residual = (t.to(maps.dtype) for t in mix[2:])
    hidden = maps
    if mix.expand is not None and mix.expand_bias is not None:
        expand, expand_bias = mix.expand.to(maps.dtype), mix.expand_bias.to(maps.dtype)
        hidden = F.relu6(F.conv2d(maps, expand[:, :, None, None], expand_bias))
    hidden = F.conv2d(hidden, local[:, None], local_bias, padding=1, groups=local.shape[0])
    refined = F.conv2d(F.relu6(hidden), reduce[:, :, None, None], reduce_bias)
    return refined + residual[:, None, None] * maps
