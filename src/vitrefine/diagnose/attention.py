"""How spread out attention is, layer by layer, and where on an image a model looks (CB, Section 3; Figures 2 and 5).

Entropy of a softmax row: −Σ_j a_j log a_j, in nats; log N at most, when every key counts the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrefine.diagnose.capture import Attention, capture
from vitrefine.errors import UserError
from vitrefine.surgery.maps import read_maps

ENTRIES = 1 << 26  # of maps held at a time
MOST_PREFIX_TOKENS = 8  # class, distillation and register tokens


@dataclass(frozen=True)
class LayerEntropy:
    """The mean entropy of each head's rows, and the most that it can be."""

    name: str
    entropy: Tensor  # (heads,)
    bound: float  # log of the number of keys


def row_entropy(maps: Tensor) -> Tensor:
    """The entropy of each row of (…, queries, keys) maps."""
    return torch.special.entr(maps).sum(dim=-1)


@torch.no_grad()
def attention_entropy(model: nn.Module, images: Tensor) -> list[LayerEntropy]:
    """The entropy of every attention of a model, over images and queries, in the order in which they run."""
    return [_entropy(attention) for attention in _look(model, images)]


def _entropy(attention: Attention) -> LayerEntropy:
    total, rows, keys = torch.zeros(attention.heads, dtype=torch.float64), 0, 1
    for call in attention.calls:
        one = call.maps(slice(0, 1))
        keys = one.shape[-1]
        step = max(1, ENTRIES // one.numel())
        for start in range(0, len(call), step):
            entropy = row_entropy(call.maps(slice(start, start + step)).float())
            total += entropy.sum(dim=(0, 2)).double().cpu()
            rows += entropy.shape[0] * entropy.shape[2]
    return LayerEntropy(attention.name, (total / rows).float(), math.log(keys))


@torch.no_grad()
def attention_map(model: nn.Module, images: Tensor, layer: int = -1) -> Tensor:
    """Where a model looks, (B, h, w) in 0..1: what its class token attends to, or its mean token where it has none.

    Args:
        model: Any model whose attention can be captured.
        images: (B, C, H, W).
        layer: Which attention, counted among those that see the whole image at once; the last by default.
    """
    size = (images.shape[-2], images.shape[-1])
    prefix_tokens = getattr(model, "num_prefix_tokens", 0)
    seen = [found for a in _look(model, images) if (found := _over_image(a, len(images), size, prefix_tokens))]
    if not seen:
        raise UserError(f"no attention of {type(model).__name__} sees the whole image at once, so no map can be drawn")
    try:
        attention, prefix, height, width = seen[layer]
    except IndexError:
        raise UserError(f"layer {layer} is out of range: {len(seen)} attentions see the whole image at once") from None
    maps = attention.calls[-1].maps().float().mean(dim=1)
    row = maps[:, 0] if prefix else maps.mean(dim=1)
    heat = row[:, prefix:].unflatten(-1, (height, width))
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp(min=1e-12)


def _look(model: nn.Module, images: Tensor) -> list[Attention]:
    training = model.training
    model.eval()
    try:
        with capture(model) as attentions:
            model(images)
    finally:
        model.train(training)
    return [attention for attention in attentions if attention.calls]


def _over_image(
    attention: Attention, batch: int, size: tuple[int, int], prefix_tokens: int
) -> tuple[Attention, int, int, int] | None:
    """The number of tokens that come before the patches, and the grid of patches; None for windows and the like."""
    call = attention.calls[-1]
    if len(call) != batch:
        return None
    keys = call.maps(slice(0, 1)).shape[-1]
    for prefix in (prefix_tokens, *range(MOST_PREFIX_TOKENS)):
        for grid in read_maps((1, keys - prefix, 1), size) if keys - prefix >= 4 else ():
            if abs(grid.height / grid.width - size[0] / size[1]) < 1e-6 or grid.height == grid.width:
                return attention, prefix, grid.height, grid.width
    return None
