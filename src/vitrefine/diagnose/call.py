"""One attention as it was computed: queries and keys where attention is fused, maps where a model writes them out.

Maps are made when they are asked for, a slice of images and a slice of queries at a time, so that whoever streams over
them never holds one as a whole. Refinement (Refiner, Section 3.3) convolves over queries too: a slice of refined maps
is made from a slice that is larger by the reach of the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrefine.ops.attention_statistics import cut_mask
from vitrefine.ops.refined_attention import attention_maps, visible_pairs

ALL = slice(None)


@dataclass(frozen=True)
class Refinement:
    """What happens to maps after the softmax; each refined row depends on `reach` rows on either side."""

    apply: Callable[[Tensor], Tensor]
    reach: int


@dataclass(frozen=True)
class Call:
    """Queries and keys, or the maps themselves; and what became of the maps where they were refined."""

    q: Tensor | None = None  # (B, heads, queries, width)
    k: Tensor | None = None
    attn_mask: Tensor | None = None
    scale: float | None = None
    written: Tensor | None = None  # (B, heads, queries, keys), where the model itself made them
    refinement: Refinement | None = None
    refined: Tensor | None = None  # in the place of a refinement, where the model wrote these out as well
    proper: bool = True  # the rows are distributions; not so those of maps that were handed on from block to block

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, heads, queries, keys) of the maps."""
        if self.written is not None:
            images, heads, queries, keys = self.written.shape
        else:
            assert self.q is not None
            assert self.k is not None
            images, heads, queries, keys = *self.q.shape[:3], self.k.shape[2]
        return images, heads, queries, keys

    @property
    def is_refined(self) -> bool:
        return self.refinement is not None or self.refined is not None

    def __len__(self) -> int:
        return self.shape[0]

    @torch.no_grad()
    def maps(self, images: slice = ALL, queries: slice = ALL) -> Tensor:
        """The maps (B, heads, queries, keys) before any refinement, or those of some images and queries."""
        if self.written is not None:
            return self.written[images, :, queries]
        assert self.q is not None
        assert self.k is not None
        kind = torch.promote_types(self.q.dtype, torch.float32)
        q, k = self.q[images, :, queries].to(kind), self.k[images].to(kind)
        with torch.autocast(q.device.type, enabled=False):  # statistics of half a digit would say nothing
            return attention_maps(q, k, attn_mask=self._mask(images, queries), scale=self.scale)

    @torch.no_grad()
    def refined_maps(self, images: slice = ALL, queries: slice = ALL) -> Tensor:
        """The maps after refinement; those before it where there is none."""
        if self.refined is not None:
            return self.refined[images, :, queries]
        if self.refinement is None:
            return self.maps(images, queries)
        start, stop, _ = queries.indices(self.shape[2])
        first, last = max(0, start - self.refinement.reach), min(self.shape[2], stop + self.refinement.reach)
        around = self.maps(images, slice(first, last))
        with torch.autocast(around.device.type, enabled=False):
            refined = self.refinement.apply(around)[:, :, start - first : stop - first]
        mask = self._mask(images, slice(start, stop))
        if mask is None:
            return refined
        visible = visible_pairs(mask)
        if visible.ndim == 4 and visible.shape[1] not in (1, refined.shape[1]):
            visible = visible.any(dim=1, keepdim=True)
        return refined.masked_fill(~visible, 0)

    def _mask(self, images: slice, queries: slice) -> Tensor | None:
        mask = self.attn_mask
        if mask is None:
            return None
        return cut_mask(mask.reshape((1,) * (4 - mask.ndim) + mask.shape), images, queries)
