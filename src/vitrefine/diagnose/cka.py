"""How alike two representations of the same images are: linear centred kernel alignment (Kornblith et al., 2019).

With K = XXᵀ and L = YYᵀ, X and Y one row an image:

    HSIC(K, L)   tr(K H L H), H = 1 − 11ᵀ/n
    CKA(X, Y)    HSIC(K, L) / √(HSIC(K, K) · HSIC(L, L)), which is ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of centred X and Y

It does not change when features are rotated, shifted or scaled as a whole; grams are of centred features, for what
these have in common would cost digits. For sets too large for one matrix, HSIC is estimated
without bias on minibatches and averaged before it is divided (Nguyen et al., 2021). Feature evolution (Refiner,
Eqn. 2) of block k: F_k = CKA(f_k, f_out) / CKA(f_in, f_out), f_in the features of the first block, f_out those of
the last; the mean over batches of 32 images.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.token_statistics import centred_gram

LEAST_IMAGES = 4  # of an unbiased estimate


def hsic(one: Tensor, other: Tensor) -> Tensor:
    """tr(K H L H) of two grams, over the last two axes."""
    return (_centred(one) * _centred(other)).sum(dim=(-2, -1))


def _centred(k: Tensor) -> Tensor:
    return k - k.mean(dim=-1, keepdim=True) - k.mean(dim=-2, keepdim=True) + k.mean(dim=(-2, -1), keepdim=True)


def unbiased_hsic(grams: Tensor) -> Tensor:
    """The unbiased estimate (Song et al., 2012, Eqn. 5) of each pair of (k, n, n) grams, (k, k); n is at least 4.

    It may be negative.
    """
    n = grams.shape[-1]
    if n < LEAST_IMAGES:
        raise UserError(f"{n} images are too few to estimate similarity without bias; give at least {LEAST_IMAGES}")
    hollow = grams * (1 - torch.eye(n, dtype=grams.dtype, device=grams.device))
    sums, flat = hollow.sum(dim=-1), hollow.flatten(1)
    totals = sums.sum(dim=-1)
    pairs = flat @ flat.mT + totals[:, None] * totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * (sums @ sums.mT)
    return pairs / (n * (n - 3))


def linear_cka(x: Tensor, y: Tensor) -> float:
    """CKA of (n, …) features of the same n images."""
    if len(x) != len(y):
        raise UserError(
            f"features of {len(x)} and of {len(y)} images cannot be compared; give those of the same images"
        )
    one, other = centred_gram(x), centred_gram(y)
    return _aligned(hsic(one, other), hsic(one, one), hsic(other, other)).item()


def _aligned(both: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """HSIC divided by the root of the others'; zero where a representation is the same for all images."""
    norm = (one.clamp(min=0) * other.clamp(min=0)).sqrt()
    return torch.where(norm > 0, both / norm.clamp(min=torch.finfo(norm.dtype).tiny), torch.zeros_like(both))


class MinibatchCka:
    """CKA of every pair of representations, from grams of one minibatch after the other."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self.batches = 0

    def update(self, grams: Sequence[Tensor]) -> None:
        """Add a batch: the (n, n) gram of each representation of its images."""
        found = unbiased_hsic(torch.stack(list(grams)))
        self._sum = found if self._sum is None else self._sum + found
        self.batches += 1

    def compute(self) -> Tensor:
        """(representations, representations)."""
        if self._sum is None:
            raise UserError(f"no batch of {LEAST_IMAGES} images or more was given, so there is nothing to compare")
        own = self._sum.diagonal()
        return _aligned(self._sum, own[:, None].expand_as(self._sum), own[None].expand_as(self._sum))


def evolution(grams: Sequence[Tensor]) -> Tensor:
    """F_k of one batch, for the grams of f_in … f_out in order: (blocks,); NaN where features are all alike."""
    stack = _centred(torch.stack(list(grams)))
    own = stack.square().sum(dim=(-2, -1))
    each = _aligned((stack * stack[-1]).sum(dim=(-2, -1)), own, own[-1])
    return each / each[0].where(each[0] > 0, torch.nan)
