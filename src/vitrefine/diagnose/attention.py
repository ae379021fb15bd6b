"""How spread out attention is, layer by layer, and where on an image a model looks (CB, Figures 4 and 10)."""

import math
from dataclasses import dataclass

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.diagnose.call import Call
from vitrefine.diagnose.capture import Attention, capture
from vitrefine.diagnose.evaluation import evaluating
from vitrefine.diagnose.grid import TokenGrid, token_grid
from vitrefine.diagnose.streamed import call_statistics
from vitrefine.errors import UserError


@dataclass(frozen=True)
class LayerEntropy:
    """The mean entropy of each head's rows, and the most that it can be."""

    name: str
    entropy: Tensor  # (heads,)
    bound: float  # log of the number of keys

    def __str__(self) -> str:
        heads = " ".join(f"{value:.2f}" for value in self.entropy.tolist())
        return f"{self.name}: {self.entropy.mean().item():.3f} of {self.bound:.3f} nats, heads {heads}"


@torch.no_grad()
def attention_entropy(model: nn.Module, images: Tensor) -> list[LayerEntropy]:
    """The entropy of every attention of a model, over images and queries, in the order in which they run."""
    totals: dict[str, list[tuple[Tensor, int, int]]] = {}

    def measure(attention: Attention, call: Call) -> None:
        if call.proper:
            entropy = call_statistics(call).entropy
            rows = entropy.shape[0] * entropy.shape[2]
            totals.setdefault(attention.name, []).append((entropy.sum(dim=(0, 2)), rows, call.shape[3]))

    with evaluating(model), capture(model, on_call=measure):
        model(images)
    found = []
    for name, parts in totals.items():
        sums, rows, keys = zip(*parts, strict=True)
        found.append(LayerEntropy(name, (sum(sums) / sum(rows)).float().cpu(), math.log(keys[-1])))
    return found


def over_image(call: Call, batch: int, size: tuple[int, int], prefix_tokens: int) -> TokenGrid | None:
    """The grid of a call whose keys are the whole image; None for windows and the like."""
    return token_grid(call.shape[3], size, prefix_tokens) if len(call) == batch else None


def prefix_tokens_of(model: nn.Module) -> int:
    """How many tokens a model says come before its patches."""
    return getattr(unwrap_model(model), "num_prefix_tokens", 0)


def has_class_token(model: nn.Module) -> bool:
    """Whether tokens before the patches begin with a class token, as they do unless a model says that it has none."""
    return getattr(unwrap_model(model), "has_class_token", True)


@torch.no_grad()
def attention_maps_on(model: nn.Module, images: Tensor) -> list[tuple[int, Tensor]]:
    """Where each layer that sees the whole image at once looks: its number from 0, and (B, h, w) in 0..1.

    That is what its class token attends to, or its mean token where it has none.
    """
    found: list[tuple[int, Tensor]] = []

    def look(attention: Attention, call: Call) -> None:
        grid = over_image(call, len(images), _size(images), prefix_tokens_of(model))
        if grid is not None and call.proper:
            some = slice(0, 1) if grid.prefix and has_class_token(model) else slice(None)
            row = call.maps(queries=some).float().mean(dim=(1, 2))
            found.append((attention.number, _heat(row, grid)))

    with evaluating(model), capture(model, on_call=look):
        model(images)
    if not found:
        raise UserError(f"no attention of {_kind(model)} sees the whole image at once, so no map can be drawn")
    return found


def attention_map(model: nn.Module, images: Tensor, layer: int = -1) -> Tensor:
    """Where a model looks, (B, h, w) in 0..1: what its class token attends to, or its mean token where it has none.

    Args:
        model: Any model whose attention can be captured.
        images: (B, C, H, W).
        layer: Which attention, counted among those that see the whole image at once; the last by default.
    """
    found = attention_maps_on(model, images)
    if not -len(found) <= layer < len(found):
        raise UserError(f"layer {layer} is out of range: {len(found)} attentions see the whole image at once")
    return found[layer][1]


@torch.no_grad()
def attention_rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Attention followed through all layers, (B, h, w) in 0..1 (Abnar and Zuidema, 2020).

    Each layer passes on half by its attention, the mean of its heads, and half by the residual path: the class token's
    row of Π (A + 1)/2, or the mean row where there is no class token. Layers that do not map all tokens to all tokens
    are left out.
    """
    rolled: Tensor | None = None
    grid: TokenGrid | None = None

    def follow(_: Attention, call: Call) -> None:
        nonlocal rolled, grid
        found = over_image(call, len(images), _size(images), prefix_tokens_of(model))
        if found is None or not call.proper or call.shape[2] != call.shape[3]:
            return
        step = roll_step(call.maps().float().mean(dim=1))
        if rolled is None or rolled.shape != step.shape:  # from one stage to the next tokens are others
            rolled, grid = step, found
        else:
            rolled = step @ rolled

    with evaluating(model), capture(model, on_call=follow):
        model(images)
    if rolled is None or grid is None:
        raise UserError(f"no attention of {_kind(model)} maps the whole image to itself, so nothing can be rolled out")
    row = rolled[:, 0] if grid.prefix and has_class_token(model) else rolled.mean(dim=1)
    return _heat(row, grid)


def _heat(row: Tensor, grid: TokenGrid) -> Tensor:
    """Attention (B, tokens) on the patches of an image, (B, h, w), the greatest of each image 1."""
    heat = row[:, grid.prefix :].unflatten(-1, (grid.height, grid.width))
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp(min=1e-12)


def roll_step(maps: Tensor) -> Tensor:
    """(A + 1)/2 of (B, N, N) maps."""
    return (maps + torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)) / 2


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def _kind(model: nn.Module) -> str:
    return type(unwrap_model(model)).__name__
