"""The measures of a call, streamed: a tile of queries at a time is all there is of a map that the model did not make.

Memory is linear in the number of tokens wherever the model's own is.
"""

import torch
from torch import Tensor

from vitrefine.diagnose.call import Call
from vitrefine.ops.attention_statistics import (
    AttentionStatistics,
    Tile,
    attention_statistics,
    cover,
    normalised_gram,
    statistics_of,
)

ENTRIES = 1 << 23  # of a tile of maps, all heads of some images together


def tiles(call: Call) -> list[Tile]:
    """Slices of images and of queries that cover a call."""
    return cover(call.shape, ENTRIES)


@torch.no_grad()
def call_statistics(call: Call, coordinates: Tensor | None = None, query: int | None = None) -> AttentionStatistics:
    """Statistics before any refinement: distance where coordinates are given, and the maps of a query that is named."""
    if call.q is not None and call.k is not None:
        with torch.autocast(call.q.device.type, enabled=False):
            return attention_statistics(
                call.q, call.k, scale=call.scale, mask=call.attn_mask, coordinates=coordinates, query=query
            )
    assert call.written is not None
    like = call.written.new_empty(0, dtype=torch.promote_types(call.written.dtype, torch.float32))
    return statistics_of(call.maps, call.shape, tiles(call), like, coordinates, query)


@torch.no_grad()
def refined_similarity(call: Call) -> Tensor:
    """Cosines between the maps of heads after refinement, (B, G, G)."""
    gram: Tensor | None = None
    for some, rows in tiles(call):
        maps = call.refined_maps(some, rows)
        flat = maps.to(torch.promote_types(maps.dtype, torch.float32)).flatten(2)
        if gram is None:
            gram = flat.new_zeros((call.shape[0], flat.shape[1], flat.shape[1]))
        gram[some] += flat @ flat.mT
    assert gram is not None
    return normalised_gram(gram)


def off_diagonal(similarity: Tensor) -> Tensor:
    """Of each head the mean cosine with the others, (B, H); with itself where it is alone."""
    heads = similarity.shape[-1]
    if heads == 1:
        return similarity[..., 0]
    return (similarity.sum(dim=-1) - similarity.diagonal(dim1=-2, dim2=-1)) / (heads - 1)
