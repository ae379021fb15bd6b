"""Statistics of tokens between blocks: how alike those of one image are, and how alike images are by all their tokens.

    mean_cosine    (‖Σ_i t_i‖² − N) / (N (N − 1)), t the N tokens of an image at length one: the mean over pairs
    centred_gram   XXᵀ of n representations less their mean, one row an image

`impl="reference"` is the specification, in single precision at least; `impl="triton"` reads the tokens once, as they
are, and keeps no copy of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.choice import HALF, HOPPER, demand_gpu, no_autocast, runs_kernels

IMPLEMENTATIONS = ("auto", "reference", "triton")
MOST_CHANNELS, MOST_IMAGES = 4096, 128


def _has_kernel(tensor: Tensor, impl: str, fits: bool) -> bool:
    check_choice("implementation", impl, IMPLEMENTATIONS)
    served = fits and tensor.dtype in (*HALF, torch.float32) and tensor.numel() > 0
    if impl == "triton" and not served:
        raise UserError(
            f"the kernels for tokens take at most {MOST_IMAGES} images or {MOST_CHANNELS} channels in half or single "
            f"precision, not {tuple(tensor.shape)} in {tensor.dtype}; use impl='reference'"
        )
    if impl == "triton":
        demand_gpu(tensor, "reference")
    return impl == "triton" or (impl == "auto" and served and runs_kernels(tensor, HOPPER))


@torch.no_grad()
def mean_cosine(tokens: Tensor, *, impl: str = "auto") -> Tensor:
    """The mean cosine of two different tokens, (B,) of (B, N, C); no N×N cosines are there at any time."""
    if _has_kernel(tokens, impl, tokens.shape[-1] <= MOST_CHANNELS):
        from vitrefine.ops.kernels.token_statistics import mean_cosine_triton

        return mean_cosine_triton(tokens)
    count = tokens.shape[1]
    unit = F.normalize(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), dim=-1)
    lengths = unit.square().sum(dim=(1, 2))  # N, unless tokens are zero
    return (unit.sum(dim=1).square().sum(dim=-1) - lengths) / max(1, count * (count - 1))


@torch.no_grad()
def centred_gram(features: Tensor, *, impl: str = "auto") -> Tensor:
    """XXᵀ of centred (n, …) features in float64, the products in single precision at least."""
    rows = features.flatten(1)
    if _has_kernel(rows, impl, len(rows) <= MOST_IMAGES):
        from vitrefine.ops.kernels.token_statistics import centred_gram_triton

        return centred_gram_triton(rows)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    rows = rows - rows.mean(dim=0)
    with no_autocast(rows):
        product = rows @ rows.mT
    return (product.cpu() if product.device.type == "mps" else product).double()  # which has no double precision
