"""Statistics of attention maps, streamed: no map is ever held as a whole (CB, Section 3; Refiner, Section 3.1).

With a = softmax(q kᵀ · scale + mask), one row a query:

    entropy(i)       −Σ_j a_ij log a_ij, in nats; log N at most
    distance(i)      Σ_j a_ij ‖p_i − p_j‖₁, p the coordinates of tokens
    squares(i)       Σ_j a_ij²; 1 − squares is the nuclear norm of the softmax's Jacobian, for scores in natural units
    similarity(g,h)  cosine of the maps of two heads, as vectors of N² numbers: heads that all look alike give ones

A tile of queries at a time is all there is of the maps, so memory grows linearly with the number of tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.refined_attention import attention_maps

ENTRIES = 1 << 24  # of a tile of maps, all images and heads together


class AttentionStatistics(NamedTuple):
    """What `attention_statistics` finds."""

    entropy: Tensor  # (B, H, Nq)
    squares: Tensor  # (B, H, Nq)
    similarity: Tensor  # (B, H, H)
    distance: Tensor | None  # (B, H, Nq), where coordinates were given


@torch.no_grad()
def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    coordinates: Tensor | None = None,
) -> AttentionStatistics:
    """Entropy, distance, squares and head similarity of an attention, in memory linear in the number of tokens.

    Args:
        q: Queries, (B, H, Nq, d).
        k: Keys, (B, H, Nk, d).
        scale: Factor of the scores; d^-½ if None.
        mask: Boolean (True: visible) or additive, broadcastable to (B, H, Nq, Nk).
        coordinates: Place of each token, (N, c), Nq = Nk = N; NaN for tokens that have none, such as class tokens:
            as keys they add nothing to a distance, as queries their own distance is NaN.

    Returns:
        Numbers in float32, or in float64 for inputs in float64.
    """
    batch, heads, n_queries, _ = q.shape
    n_keys = k.shape[2]
    if coordinates is not None and not coordinates.shape[0] == n_queries == n_keys:
        raise UserError(
            f"{coordinates.shape[0]} coordinates do not place {n_queries} queries and {n_keys} keys; give one a token"
        )
    kind = torch.promote_types(q.dtype, torch.float32)
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    places = None if coordinates is None else coordinates.to(q.device, kind)
    images = max(1, min(batch, ENTRIES // max(1, heads * n_keys)))
    rows = max(1, min(n_queries, ENTRIES // (images * heads * n_keys)))
    entropy, squares, distance = (q.new_empty((batch, heads, n_queries), dtype=kind) for _ in range(3))
    gram = q.new_zeros((batch, heads, heads), dtype=kind)
    for first in range(0, batch, images):
        some = slice(first, first + images)
        keys = k[some].to(kind)
        for start in range(0, n_queries, rows):
            tile = slice(start, start + rows)
            hidden = None if mask is None else _cut(mask, some, tile)
            maps = attention_maps(q[some, :, tile].to(kind), keys, attn_mask=hidden, scale=scale)
            entropy[some, :, tile] = torch.special.entr(maps).sum(dim=-1)
            squares[some, :, tile] = maps.square().sum(dim=-1)
            flat = maps.flatten(2)
            gram[some] += flat @ flat.mT
            if places is not None:
                apart = (places[tile, None] - places).abs().sum(dim=-1).masked_fill(places.isnan().any(dim=-1), 0)
                distance[some, :, tile] = (maps * apart).sum(dim=-1)
    if places is not None:
        distance[:, :, places.isnan().any(dim=-1)] = torch.nan
    norm = gram.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=torch.finfo(kind).tiny)
    similarity = gram / (norm[..., :, None] * norm[..., None, :])
    return AttentionStatistics(entropy, squares, similarity, None if places is None else distance)


def _cut(mask: Tensor, images: slice, rows: slice) -> Tensor:
    """The part of a (B, H, Nq, Nk) mask, any of them 1, that belongs to a tile."""
    mask = mask if mask.shape[0] == 1 else mask[images]
    return mask if mask.shape[2] == 1 else mask[:, :, rows]
