"""Few heads: several images side by side, as the heads of one.

The kernels work on 16 heads, or 32, whether they are there or not: the three of ViT-Ti would leave four fifths of every
product to zeros. Five images of three heads are one image of fifteen, under a mix that is M for the heads of an image
and zero between images,

    M'[i g, j h, a, b] = δ_ij M[g, h, a, b].

Queries, keys, values and results are copied for it, which is little beside maps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.ops.kernels.refined_attention_plan import MULTIPROCESSORS
from vitrefine.ops.kernels.shapes import cdiv, padded

ROWS = 32  # of a program of the widest kernels


def images_together(batch: int, maps: int, rows: int) -> int:
    """How many images of so many maps are best taken for one: what 16 heads hold, if that still fills the GPU."""
    return max(1, min(batch, padded(maps) // maps, batch * cdiv(rows, ROWS) // MULTIPROCESSORS))


def pack(tensor: Tensor, images: int) -> Tensor:
    """(B, H, N, d) as (⌈B / images⌉, images · H, N, d); images that are missing at the end are zero."""
    batch, heads = tensor.shape[:2]
    groups = cdiv(batch, images)
    tensor = F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, groups * images - batch))
    return tensor.reshape(groups, images * heads, *tensor.shape[2:])


def spread(mix: Tensor, images: int) -> Tensor:
    """The mix of all of them: (G, H, k, k) as (images · G, images · H, k, k)."""
    mixed, heads = mix.shape[:2]
    alone = torch.eye(images, device=mix.device, dtype=mix.dtype)
    return torch.einsum("ij,ghab->igjhab", alone, mix).reshape(images * mixed, images * heads, *mix.shape[2:])


def unpack(tensor: Tensor, images: int, batch: int) -> Tensor:
    """(⌈B / images⌉, images · G, N, M) as (B, G, N, M), laid out as it was: tokens before heads if they were."""
    apart = tensor.unflatten(1, (images, -1))
    if tensor.stride(1) < tensor.stride(2):
        return apart.transpose(2, 3).flatten(0, 1)[:batch].transpose(1, 2)
    return apart.flatten(0, 1)[:batch]
