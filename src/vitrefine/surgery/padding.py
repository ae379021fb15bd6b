"""Padding: tokens that fill a batch of texts up and mean nothing. The mean token must not see them.

A layer is told about them by its `attention_mask`. Its graft leaves them in a `Padding` while it runs, where the
broadcast inside the layer finds them. The layers and not the model, because activation checkpointing runs a layer
again when the model's forward is over, and because ViLT joins the masks of text and image only on the way there.
"""

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.ops.refined_attention import visible_pairs
from vitrefine.surgery.graft import Graft, graft, lineage

PADDING_GAP = 5000  # padding is written as -10000, the lowest finite number or -inf
MASK_ARGUMENTS = ("attention_mask", "attn_mask")  # of Hugging Face, and of timm


class Padding(threading.local):
    """What is known of the padding of the layer that runs now; in each thread by itself, for models run in several."""

    real: Tensor | None = None  # (B, N), True: a token that is no padding

    def __reduce__(self) -> tuple[type["Padding"], tuple[()]]:
        return Padding, ()

    def mask_for(self, x: Tensor) -> Tensor | None:
        """The mask of the (B, N, C) tokens x, if it is they that were told about."""
        if self.real is None or x.ndim != 3 or self.real.shape[-1] != x.shape[1]:
            return None
        return self.real if self.real.shape[0] in (1, x.shape[0]) else None


class NotesPadding(Graft):
    """A layer that leaves the padding which its mask argument tells of in `noted_padding`, while it runs."""

    noted_padding: Padding
    mask_argument: tuple[str, int]  # its name, and its position after self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name, position = self.mask_argument
        mask = kwargs[name] if name in kwargs else args[position] if len(args) > position else None
        outer = self.noted_padding.real
        self.noted_padding.real = None if mask is None else real_tokens(mask, name)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.noted_padding.real = outer


def real_tokens(mask: Any, name: str = "attention_mask") -> Tensor:
    """Which tokens are no padding, (B, N): the keys that some query of some head may see.

    Args:
        mask: Boolean (True: visible) or additive, (B, N, N), (B, heads, N, N), or with ones for the axes in between;
            if it has two axes, those of an `attention_mask` are (B, N), not 0 for a real token, else they are (N, N).
        name: Of the argument.
    """
    if not isinstance(mask, Tensor):
        raise UserError(f"a mask that is a {type(mask).__name__} cannot be read; choose attn_implementation='sdpa'")
    if mask.ndim == 2:
        return mask != 0 if name == "attention_mask" else visible_pairs(mask).any(dim=0, keepdim=True)
    return visible_pairs(mask).flatten(1, -2).any(dim=1)


def real_queries(visible: Tensor) -> Tensor:
    """Which queries of a self-attention are no padding, (…, N, 1): those whose token some query sees as a key.

    A refiner's kernel reaches from one query's row of the map to the next, so the rows of padding have to be zero
    before it, as is what lies beyond the edge of the map.
    """
    seen = visible.any(dim=-2, keepdim=True)
    return (seen if seen.ndim < 3 else seen.any(dim=-3, keepdim=True)).transpose(-2, -1)


def real_queries_of_scores(scores: Tensor) -> Tensor:
    """As `real_queries`, of scores to which the mask was added: theirs lie far apart too, but not as far as padding's.

    A model whose scores differ by hundreds has one-hot maps, and keys that nobody sees are no padding for that.
    """
    return real_queries(scores > scores.amax(dim=-1, keepdim=True) - PADDING_GAP)


def hide_padded_queries(attn_mask: Tensor) -> Tensor:
    """The mask of a self-attention in which padding sees nothing, and so has rows of zeros."""
    real = real_queries(visible_pairs(attn_mask))
    return attn_mask & real if attn_mask.dtype == torch.bool else torch.where(real, attn_mask, float("-inf"))


def mask_argument(layer: nn.Module) -> tuple[str, int] | None:
    """The argument by which a layer is told of padding, and its position after self; None if there is none."""
    arguments = list(inspect.signature(lineage(type(layer))[-1].forward).parameters)  # type: ignore[attr-defined]
    return next(((name, arguments.index(name) - 1) for name in MASK_ARGUMENTS if name in arguments), None)


def is_told_of_padding(model: nn.Module, name: str) -> bool:
    """Whether the module of that name, or one around it, takes a mask."""
    parts = name.split(".")
    owners = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1))
    return any(mask_argument(owner) for owner in owners)


def padding_around(model: nn.Module, name: str) -> Padding | None:
    """What will know of padding while the module of that name runs; None if nothing tells the model of padding."""
    while name:
        name = name.rpartition(".")[0]
        layer = model.get_submodule(name)
        if isinstance(layer, NotesPadding):
            return layer.noted_padding
        if argument := mask_argument(layer):
            padding = Padding()
            graft(model, layer, NotesPadding, noted_padding=padding, mask_argument=argument)
            return padding
    return None
