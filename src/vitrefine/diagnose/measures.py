"""What is measured of attention maps that are at hand, (…, queries, keys); `streamed` measures those that are not.

entropy       −Σ_j a_ij log a_ij, in nats; log N at most, when every key counts the same (CB, Section 3.1)
distance      Σ_{j≠i} a_ij ‖p_i − p_j‖₁ between spatial tokens, p from 0 to 1 on both axes (CB, Section 3.3);
              the paper's mean over all pairs is this over N − 1, which would shrink with every added token
gradient      λ Σ_j (a_ij − a_ij²): the nuclear norm of the softmax's Jacobian, greatest at uniform attention
similarity    cosine of the maps of two heads: heads that all do the same give ones
"""

import torch
from torch import Tensor

from vitrefine.ops.attention_statistics import normalised_gram
from vitrefine.ops.token_statistics import mean_cosine


def row_entropy(maps: Tensor) -> Tensor:
    """The entropy of each row."""
    return torch.special.entr(maps).sum(dim=-1)


def relative_distance(maps: Tensor, coordinates: Tensor) -> Tensor:
    """How far each query looks, (…, queries).

    Args:
        maps: (…, N, N).
        coordinates: (N, c), NaN for tokens that have no place: as keys they add nothing, as queries they give NaN.
    """
    apart = (coordinates[:, None] - coordinates).abs().sum(dim=-1)
    placed = ~coordinates.isnan().any(dim=-1)
    distance = (maps * apart.masked_fill(~placed, 0).to(maps)).sum(dim=-1)
    return distance.masked_fill(~placed.to(maps.device), torch.nan)


def softmax_gradient(maps: Tensor, scale: float = 1.0) -> Tensor:
    """The nuclear norm of the Jacobian of each row's softmax; `scale` is the factor λ of its scores."""
    return scale * (maps.sum(dim=-1) - maps.square().sum(dim=-1))


def head_similarity(maps: Tensor) -> Tensor:
    """Cosines between the maps of heads, (…, heads, heads) of (…, heads, queries, keys)."""
    return normalised_gram((flat := maps.flatten(-2)) @ flat.mT)


def token_similarity(tokens: Tensor) -> Tensor:
    """The mean cosine of two different tokens, (B,) of (B, N, C): near one, tokens have been smoothed into one."""
    return mean_cosine(tokens)
