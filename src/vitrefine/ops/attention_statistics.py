"""Statistics of attention maps, streamed: no map is ever held as a whole (CB, Section 3; Refiner, Section 3.1).

With a = softmax(q kᵀ · scale + mask), one row a query:

    entropy(i)       −Σ_j a_ij log a_ij, in nats; log N at most
    distance(i)      Σ_j a_ij ‖p_i − p_j‖₁, p the coordinates of tokens
    squares(i)       Σ_j a_ij²; 1 − squares is the nuclear norm of the softmax's Jacobian, for scores in natural units
    similarity(g,h)  cosine of the maps of two heads, as vectors of N² numbers: heads that all look alike give ones

A tile of queries at a time is all there is of the maps, so memory grows linearly with the number of tokens.
`impl="reference"` makes such tiles in float32 and is the specification; the tiles of `impl="triton"` never leave the
chip.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.choice import HOPPER, demand_gpu, no_autocast, runs_kernels
from vitrefine.ops.refined_attention import attention_maps

IMPLEMENTATIONS = ("auto", "reference", "triton")
ENTRIES = 1 << 24  # of a tile of maps, all images and heads together

Tile = tuple[slice, slice]  # of images and of queries


class AttentionStatistics(NamedTuple):
    """What `attention_statistics` finds."""

    entropy: Tensor  # (B, H, Nq)
    squares: Tensor  # (B, H, Nq)
    similarity: Tensor  # (B, H, H)
    distance: Tensor | None = None  # (B, H, Nq), where coordinates were given
    row: Tensor | None = None  # (B, H, Nk), where a query was named


@torch.no_grad()
def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    coordinates: Tensor | None = None,
    query: int | None = None,
    impl: str = "auto",
) -> AttentionStatistics:
    """Entropy, distance, squares and head similarity of an attention, in memory linear in the number of tokens.

    Args:
        q: Queries, (B, H, Nq, d).
        k: Keys, (B, H, Nk, d).
        scale: Factor of the scores; d^-½ if None.
        mask: Boolean (True: visible) or additive, broadcastable to (B, H, Nq, Nk).
        coordinates: Place of each token, (N, c), Nq = Nk = N; NaN for tokens that have none, such as class tokens:
            as keys they add nothing to a distance, as queries their own distance is NaN.
        query: One whose rows of the maps are wanted as well.
        impl: `reference`, `triton`, or `auto`: the kernels on a GPU where they apply.

    Returns:
        Numbers in float32, or in float64 for inputs in float64.
    """
    check_choice("implementation", impl, IMPLEMENTATIONS)
    n_queries, n_keys = q.shape[2], k.shape[2]
    if coordinates is not None and not coordinates.shape[0] == n_queries == n_keys:
        raise UserError(
            f"{coordinates.shape[0]} coordinates do not place {n_queries} queries and {n_keys} keys; give one a token"
        )
    if query is not None and not 0 <= query < n_queries:
        raise UserError(f"there is no query {query}; the last of {n_queries} is {n_queries - 1}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if impl == "triton":
        demand_gpu(q, "reference")
    if impl == "triton" or (impl == "auto" and runs_kernels(q, HOPPER)):
        from vitrefine.ops.kernels.attention_statistics_op import attention_statistics_triton, serves

        if impl == "triton" or serves(q, k, coordinates):
            found = attention_statistics_triton(q, k, scale=scale, mask=mask, coordinates=coordinates, query=query)
            return AttentionStatistics(*found)
    kind = torch.promote_types(q.dtype, torch.float32)

    def maps(images: slice, queries: slice) -> Tensor:
        hidden = None if mask is None else cut_mask(mask, images, queries)
        return attention_maps(q[images, :, queries].to(kind), k[images].to(kind), attn_mask=hidden, scale=scale)

    shape = (*q.shape[:3], n_keys)
    return statistics_of(maps, shape, cover(shape, ENTRIES), q.new_empty(0, dtype=kind), coordinates, query)


def cover(shape: tuple[int, int, int, int], entries: int) -> list[Tile]:
    """Slices of images and of queries that cover maps of this shape, each of so many entries at most."""
    images, heads, queries, keys = shape
    together = max(1, min(images, entries // max(1, heads * queries * keys)))
    rows = max(1, min(queries, entries // max(1, together * heads * keys)))
    return [
        (slice(first, min(images, first + together)), slice(start, min(queries, start + rows)))
        for first in range(0, images, together)
        for start in range(0, queries, rows)
    ]


def statistics_of(
    maps: Callable[[slice, slice], Tensor],
    shape: tuple[int, int, int, int],
    tiles: Iterable[Tile],
    like: Tensor,
    coordinates: Tensor | None,
    query: int | None,
) -> AttentionStatistics:
    """Statistics of maps that are made a tile at a time, in the type of `like` whatever autocast would have.

    Args:
        maps: Gives those of some images and queries.
        shape: Of all of them, (B, H, Nq, Nk).
        tiles: That cover them, each pair of an image and a query in one of them.
        like: Of the type and on the device of the results.
        coordinates: As in `attention_statistics`.
        query: As in `attention_statistics`.
    """
    batch, heads, n_queries, _ = shape
    places = None if coordinates is None else coordinates.to(like)
    nowhere = None if places is None else places.isnan().any(dim=-1)
    entropy, squares, distance = (like.new_empty((batch, heads, n_queries)) for _ in range(3))
    gram = like.new_zeros((batch, heads, heads))
    with no_autocast(like):
        for some, rows in tiles:
            tile = maps(some, rows).to(like)
            entropy[some, :, rows] = torch.special.entr(tile).sum(dim=-1)
            squares[some, :, rows] = tile.square().sum(dim=-1)
            flat = tile.flatten(2)
            gram[some] += flat @ flat.mT
            if places is not None and nowhere is not None:
                apart = (places[rows, None] - places).abs().sum(dim=-1).masked_fill(nowhere, 0)
                distance[some, :, rows] = (tile * apart).sum(dim=-1)
        row = None if query is None else maps(slice(None), slice(query, query + 1)).to(like)[:, :, 0]
    if nowhere is not None:
        distance.masked_fill_(nowhere, torch.nan)
    return AttentionStatistics(entropy, squares, normalised_gram(gram), None if places is None else distance, row)


def normalised_gram(gram: Tensor) -> Tensor:
    """Cosines out of inner products; zero with a vector that is."""
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt().clamp(min=torch.finfo(gram.dtype).tiny)
    return gram / norm[..., :, None] / norm[..., None, :]


def cut_mask(mask: Tensor, images: slice, queries: slice) -> Tensor:
    """The part of a (B, H, Nq, Nk) mask, any of them 1, that belongs to a tile."""
    mask = mask if mask.shape[0] == 1 else mask[images]
    return mask if mask.shape[2] == 1 else mask[:, :, queries]
