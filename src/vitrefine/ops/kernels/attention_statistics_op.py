"""The statistics of attention as one operator over three kernels; nothing of it is differentiable."""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.kernels.attention_statistics import (
    ADDITIVE,
    BOOLEAN,
    LOG2_E,
    UNMASKED,
    cosine_kernel,
    gram_kernel,
    rows_kernel,
)
from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.shapes import cdiv, padded, rows_contiguous

KINDS = (torch.float16, torch.bfloat16, torch.float32)
MAX_DIM, MAX_HEADS, MAX_PLACES = 128, 32, 2
GRAM_BYTES = 96 << 10  # of queries and keys of all heads that are in shared memory together


def serves(q: Tensor, k: Tensor, coordinates: Tensor | None) -> bool:
    """Whether the kernels take these."""
    fits = q.shape[1] <= MAX_HEADS and q.shape[-1] <= MAX_DIM and 0 not in (*q.shape, *k.shape)
    placed = coordinates is None or coordinates.shape[1] <= MAX_PLACES
    return q.dtype == k.dtype and q.dtype in KINDS and fits and placed


def rows_tile(n_keys: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Of the first kernel; keys that would fill less than half of their last tile are better cut into smaller ones."""
    small = dtype == torch.float32 or dim > 64 or (n_keys <= 1024 and -n_keys % 64 >= 32)
    return {"ROWS": 64, "KEYS": 32 if small else 64, "num_warps": 4, "num_stages": 3}


def gram_tile(heads: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Of the second kernel, which has all heads at once."""
    heads = max(8, triton.next_power_of_2(heads))
    rows, keys = {8: (32, 16), 16: (16, 32), 32: (16, 16)}[heads]
    chunk = width = padded(dim)
    while chunk > 16 and heads * (rows + keys) * chunk * dtype.itemsize > GRAM_BYTES:
        chunk //= 2
    sides = {"HEADS": heads, "ROWS": rows, "KEYS": keys, "DIM": width, "CHUNK": chunk}
    return {**sides, "num_warps": 4 if heads == 8 and dtype != torch.float32 else 8, "num_stages": 2}


@torch.library.custom_op("vitrefine::attention_statistics", mutates_args=())
@on_its_device
def _statistics(
    q: Tensor, k: Tensor, mask: Tensor | None, places: Tensor | None, scale: float, query: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Entropy, squares, similarity, distance (empty without places) and one query's maps (empty for -1)."""
    q, k = rows_contiguous(q), rows_contiguous(k)
    batch, heads, n_queries, dim = q.shape
    n_keys = k.shape[2]
    entropy, squares, similarity, distance, row = _empty(q, k, places, query)
    lse = torch.empty_like(entropy)
    kind = UNMASKED
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        kind = BOOLEAN if mask.dtype == torch.bool else ADDITIVE
        mask = mask.expand(batch, heads, n_queries, n_keys)
        strides = mask.stride()
        mask = mask.view(torch.uint8) if kind == BOOLEAN else mask
    precision = "tf32x3" if q.dtype == torch.float32 else "ieee"
    launch = Launcher("attention_statistics", [q, k, mask, places])
    sizes = (*q.stride()[:3], *k.stride()[:3], *strides, heads, n_queries, n_keys, dim, scale * LOG2_E.value)
    tile = rows_tile(n_keys, dim, q.dtype)
    launch(
        rows_kernel,
        (batch * heads * cdiv(n_queries, tile["ROWS"]), 1, 1),
        q,
        k,
        q if mask is None else mask,
        q if places is None else places,
        entropy,
        squares,
        distance,
        lse,
        *sizes,
        MASK=kind,
        PLACED=places is not None,
        DIM=padded(dim),
        PRECISION=precision,
        **tile,
    )
    tile = gram_tile(heads, dim, q.dtype)
    tiles = cdiv(n_queries, tile["ROWS"])
    partial = lse.new_empty((batch, tiles, tile["HEADS"], tile["HEADS"]))
    launch(
        gram_kernel,
        (batch * tiles, 1, 1),
        q,
        k,
        q if mask is None else mask,
        lse,
        partial,
        row,
        *sizes,
        query,
        MASK=kind,
        PRECISION=precision,
        **tile,
    )
    launch(cosine_kernel, (batch, 1, 1), partial, similarity, tiles, heads, HEADS=tile["HEADS"], TILES=8)
    return entropy, squares, similarity, distance, row


def _empty(q: Tensor, k: Tensor, places: Tensor | None, query: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, n_queries, _ = q.shape
    rows = (batch, heads, n_queries)
    shapes = (rows, rows, (batch, heads, heads), rows if places is not None else (0,))
    row = (batch, heads, k.shape[2]) if query >= 0 else (0,)
    entropy, squares, similarity, distance = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return entropy, squares, similarity, distance, q.new_empty(row, dtype=torch.float32)


@_statistics.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor | None, places: Tensor | None, scale: float, query: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty(q, k, places, query)


def attention_statistics_triton(
    q: Tensor, k: Tensor, *, scale: float, mask: Tensor | None, coordinates: Tensor | None, query: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Entropy, squares, similarity, distance and the maps of one query; arguments as of `attention_statistics`.

    Args:
        q: Queries, (B, H, Nq, d); at most 32 heads of 128 channels, half or single precision.
        k: Keys, (B, H, Nk, d), of the same type.
        scale: Factor of the scores.
        mask: Boolean or additive, of four axes.
        coordinates: (N, 1) or (N, 2).
        query: Whose maps are wanted as well.
    """
    if not serves(q, k, coordinates):
        raise UserError(
            f"the kernel for attention statistics takes at most {MAX_HEADS} heads of {MAX_DIM} channels in half or "
            f"single precision and {MAX_PLACES} coordinates, not {tuple(q.shape)} in {q.dtype}; use impl='reference'"
        )
    places = None
    if coordinates is not None:
        places = coordinates.to(q.device, torch.float32).contiguous()
        places = places if places.shape[1] == MAX_PLACES else F.pad(places, (0, MAX_PLACES - places.shape[1]))
    found = _statistics(q, k, mask, places, scale, -1 if query is None else query)
    entropy, squares, similarity, distance, row = found
    return entropy, squares, similarity, None if places is None else distance, None if query is None else row
