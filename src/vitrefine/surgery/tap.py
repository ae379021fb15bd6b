"""The tap: while a module's own forward runs, its attention passes through our hands.

Models compute attention in two ways. Fused: `F.scaled_dot_product_attention(q, k, v)`. Plain: a softmax over the keys,
then a product with the values. A `TorchFunctionMode` that is active only inside the module's forward sees both calls,
whatever the module does around them: projections, rotary embeddings, biases, masks, norms of queries and keys. So one
mechanism serves every family, and the module keeps its code and the names of its weights.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitrefine.surgery.heads import HeadAxis

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


class Attending(Protocol):
    """What a tap hands attention to. Tensors come as (B, heads, tokens, width) and (B, heads, queries, keys)."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, scale: float | None
    ) -> Tensor:
        """In the place of `F.scaled_dot_product_attention`."""

    def attend_maps(self, scores: Tensor, maps: Tensor) -> Tensor:
        """In the place of `maps`, the softmax of `scores` over the keys."""


def sdpa_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `F.scaled_dot_product_attention` by name, defaults left out."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return dict(zip(names, args, strict=False)) | kwargs


def is_softmax_over_keys(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A softmax along the last axis of a (…, queries, keys) tensor."""
    if func not in SOFTMAX:
        return False
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)


class AttentionTap(TorchFunctionMode):
    """Hands the attention that is computed while it is active to `site`."""

    def __init__(self, site: Attending, axis: HeadAxis) -> None:
        super().__init__()
        self.site, self.axis = site, axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(**sdpa_arguments(args, kwargs))
        if is_softmax_over_keys(func, args, kwargs):
            return self._plain(args[0] if args else kwargs["input"], func(*args, **kwargs))
        return func(*args, **kwargs)

    def _plain(self, scores: Tensor, maps: Tensor) -> Tensor:
        changed = self.site.attend_maps(self.axis.split(scores), self.axis.split(maps))
        return self.axis.join(changed, maps.shape).to(maps.dtype)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
        if attn_mask is not None and not self.axis.plain(query.ndim):
            attn_mask = self.axis.split(attn_mask.expand(*query.shape[:-2], -1, -1))
        q, k, v = (self.axis.split(x) for x in (query, key, value))
        out = self.site.attend(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
        return self.axis.join(out, query.shape)
