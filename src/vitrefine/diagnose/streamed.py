"""The measures of a call, streamed: a tile of queries at a time is all there is of a map that the model did not make.

Memory is linear in the number of tokens wherever the model's own is.
"""

import torch
from torch import Tensor

from vitrefine.diagnose.call import Call
from vitrefine.diagnose.measures import normalised_gram
from vitrefine.ops.attention_statistics import AttentionStatistics, attention_statistics

ENTRIES = 1 << 23  # of a tile of maps, all heads of some images together


def tiles(call: Call) -> list[tuple[slice, slice]]:
    """Slices of images and of queries that cover a call."""
    images, heads, queries, keys = call.shape
    together = max(1, min(images, ENTRIES // max(1, heads * queries * keys)))
    rows = max(1, min(queries, ENTRIES // max(1, together * heads * keys)))
    return [
        (slice(first, min(images, first + together)), slice(start, min(queries, start + rows)))
        for first in range(0, images, together)
        for start in range(0, queries, rows)
    ]


@torch.no_grad()
def call_statistics(call: Call, coordinates: Tensor | None = None) -> AttentionStatistics:
    """Entropy, squares, head similarity and, where coordinates are given, distance, before any refinement."""
    if call.q is not None and call.k is not None:
        with torch.autocast(call.q.device.type, enabled=False):
            return attention_statistics(call.q, call.k, scale=call.scale, mask=call.attn_mask, coordinates=coordinates)
    return _of_written(call, coordinates)


def _of_written(call: Call, coordinates: Tensor | None) -> AttentionStatistics:
    images, heads, queries, _ = call.shape
    assert call.written is not None
    kind = torch.promote_types(call.written.dtype, torch.float32)
    places = None if coordinates is None else coordinates.to(call.written.device, kind)
    entropy, squares, distance = (call.written.new_empty((images, heads, queries), dtype=kind) for _ in range(3))
    gram = call.written.new_zeros((images, heads, heads), dtype=kind)
    for some, rows in tiles(call):
        maps = call.maps(some, rows).to(kind)
        entropy[some, :, rows] = torch.special.entr(maps).sum(dim=-1)
        squares[some, :, rows] = maps.square().sum(dim=-1)
        gram[some] += (flat := maps.flatten(2)) @ flat.mT
        if places is not None:
            apart = (places[rows, None] - places).abs().sum(dim=-1).masked_fill(places.isnan().any(dim=-1), 0)
            distance[some, :, rows] = (maps * apart).sum(dim=-1)
    if places is not None:
        distance[:, :, places.isnan().any(dim=-1)] = torch.nan
    return AttentionStatistics(entropy, squares, normalised_gram(gram), None if places is None else distance)


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
