"""Catching attention where it happens: queries and keys of fused attention, maps where a model writes them out.

    with capture(model) as attentions:
        model(images)
    attentions[0].maps()

The tap is surgery's, put on for as long as the context lasts; the model is then what it was before. Nothing is asked
of the model: fused attention, which shows its maps to no hook, is caught like any other. Of refined attention the maps
before refinement are caught, for those are the ones whose rows are distributions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.ops.refined_attention import attention_maps
from vitrefine.surgery.graft import Graft, graft, surgery_of, undo_to
from vitrefine.surgery.heads import HeadAxis
from vitrefine.surgery.multihead import explicit_multihead
from vitrefine.surgery.refine import Refined
from vitrefine.surgery.survey import survey
from vitrefine.surgery.tap import AttentionTap


@dataclass(frozen=True)
class Call:
    """One attention as it was computed: queries and keys, or the maps themselves."""

    q: Tensor | None = None  # (B, heads, queries, width)
    k: Tensor | None = None
    attn_mask: Tensor | None = None
    scale: float | None = None
    written: Tensor | None = None  # (B, heads, queries, keys), where the model itself made them

    def maps(self, images: slice = slice(None)) -> Tensor:
        """The maps (B, heads, queries, keys), or those of some entries of the batch."""
        if self.written is not None:
            return self.written[images]
        assert self.q is not None
        assert self.k is not None
        mask = self.attn_mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[images]
        return attention_maps(self.q[images], self.k[images], attn_mask=mask, scale=self.scale)

    def __len__(self) -> int:
        tensor = self.q if self.written is None else self.written
        assert tensor is not None
        return tensor.shape[0]


@dataclass
class Attention:
    """An attention module, and what it computed while it was watched: a call for each time it ran."""

    name: str
    heads: int
    calls: list[Call] = field(default_factory=list)

    def attend_maps(self, scores: Tensor, maps: Tensor) -> Tensor:
        """Write maps down, and pass them on."""
        self.calls.append(Call(written=maps.detach()))
        return maps

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, scale: float | None
    ) -> Tensor:
        """Write queries and keys down, and attend."""
        self.calls.append(Call(q.detach(), k.detach(), attn_mask, scale))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)


class Captured(Graft):
    """A module whose attention is written down on its way."""

    captured: Attention
    captured_axis: HeadAxis

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AttentionTap(self.captured, self.captured_axis):
            return super().forward(*args, **kwargs)


@contextmanager
def capture(model: nn.Module) -> Iterator[list[Attention]]:
    """Write down the attention of every module that attends from tokens to tokens, in the order in which they run."""
    found = survey(model)
    sites = [site for site in found.attentions if not site.odd]
    if not sites:
        kind = type(model).__name__
        reasons = dict.fromkeys(site.odd for site in found.attentions)
        why = "; ".join(reasons) or "no softmax over keys happens in its forward pass"
        raise UserError(f"{kind} has no attention to look at: {why}")
    operated = "_vitrefine" in vars(model)
    before = len(surgery_of(model).undo)
    attentions = [Attention(site.name, site.heads) for site in sites]
    try:
        for site, attention in zip(sites, attentions, strict=True):
            module = model.get_submodule(site.name)
            explicit_multihead(model, module)
            # A refined module has its heads apart already where this tap sees its maps.
            axis = HeadAxis() if isinstance(module, Refined) else site.axis
            graft(model, module, Captured, captured=attention, captured_axis=axis)
        yield attentions
    finally:
        undo_to(model, before)
        if not operated:
            object.__delattr__(model, "_vitrefine")
