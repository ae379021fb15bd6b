"""`+cb`, `+cb_s`, `+cb_gate`, `+cb_hybrid`: Context Broadcasting in a model that exists (CB, Section 3.2 and Table 4).

    front – fc1 – mid – fc2 – end

`end` is after the second linear layer and its dropout, before the residual sum.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.context_broadcast import create_broadcast
from vitrefine.surgery.graft import Change, Graft, graft, lineage
from vitrefine.surgery.maps import fills_grid, tokens_first
from vitrefine.surgery.padding import Padding, padding_around
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Layers, resolve_layers
from vitrefine.surgery.survey import Survey, refuse_causal, survey

CLASS_TOKEN = re.compile(r"(cls|class)_(token|embedding|embeds)_?[0-9]*")

Position = Literal["front", "mid", "end"]
Block = Literal["mlp", "attention", "both"]


class BroadcastAfter(Graft):
    """A module whose output passes through `broadcast`."""

    broadcast: nn.Module
    broadcast_padding: Padding | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        x = output if isinstance(output, Tensor) else output[0]
        mask = None if self.broadcast_padding is None else self.broadcast_padding.mask_for(x)
        changed = self.broadcast(x, mask)
        return changed if isinstance(output, Tensor) else type(output)((changed, *output[1:]))


class BroadcastBefore(Graft):
    """A module whose first argument passes through `broadcast_before`."""

    broadcast_before: nn.Module
    broadcast_before_padding: Padding | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        mask = None if self.broadcast_before_padding is None else self.broadcast_before_padding.mask_for(x)
        changed = self.broadcast_before(x, mask)
        # PyTorch's own attention is given the same tokens three times: as queries, keys and values.
        args = tuple(changed if given is x else given for given in args)
        kwargs = {name: changed if given is x else given for name, given in kwargs.items()}
        return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class Place:
    """Where something happens to tokens: before or after a module, in which layout, with how many channels."""

    module: str
    before: bool
    layout: str
    dim: int


def mlp_places(found: Survey, model: nn.Module, position: Position) -> list[Place]:
    """One place in every MLP; a `UserError` with the reason where there is none."""
    kind = type(model).__name__
    if not found.mixes_tokens:
        raise UserError(
            f"{kind} mixes tokens by convolution or pooling only; broadcasting relieves attention, "
            "so it needs a model that attends or mixes tokens by an MLP"
        )
    if not found.mlps:
        raise UserError(f"{kind} has no MLP after its attention")
    if any(tokens_first(found.visits[site.front].inputs) for site in found.mlps):
        raise UserError(
            f"{kind} has its tokens before the batch, so that their mean would be one over images; "
            "it has to work on (batch, tokens, channels)"
        )
    if any(getattr(module, "chunk_size_feed_forward", 0) for module in model.modules()):
        raise UserError(
            f"{kind} gives its MLPs a few tokens at a time, so they see no mean; set chunk_size_feed_forward to 0"
        )
    if position == "mid":
        return [Place(_inner(model, site.middle, 0), True, site.layout, site.hidden) for site in found.mlps]
    if position == "front":
        return [Place(_inner(model, site.front, 0), True, site.layout, site.dim) for site in found.mlps]
    return [Place(_inner(model, site.end, -1), False, site.layout, site.dim) for site in found.mlps]


def _inner(model: nn.Module, name: str, index: int) -> str:
    """The first or last module of a sequence in its stead: a sequence would run a part given to it as one more step."""
    module = model.get_submodule(name)
    while isinstance(module, nn.Sequential):
        child, module = list(module.named_children())[index]
        name = f"{name}.{child}"
    return name


def _attention_places(found: Survey, model: nn.Module, position: Position) -> list[Place]:
    if position == "mid":
        raise UserError("position=mid is a place in the MLP; an attention has front and end")
    if not found.attentions:
        raise UserError(f"{type(model).__name__} has no attention: no softmax over keys happens in its forward pass")
    places = []
    for site in found.attentions:
        visit = found.visits[site.name]
        if len(visit.output) == 3 and len(visit.inputs) == 3 and not tokens_first(visit.inputs):
            places.append(Place(site.name, position == "front", "NLC", visit.output[-1]))
    if not places:
        raise UserError(f"the attention of {type(model).__name__} does not work on plain tokens; use block=mlp")
    return places


def _has_class_token(model: nn.Module, found: Survey, place: Place) -> bool:
    """Whether a class token comes first at a place: that of CaiT, XCiT and LIT-Ti joins the patches late."""
    if hasattr(getattr(model, "config", None), "vocab_size"):
        return True  # a text begins with one
    named = any(CLASS_TOKEN.fullmatch(name.rpartition(".")[2]) for name, _ in model.named_parameters())
    if not named or place.layout != "NLC":
        return False
    visit, image = found.visits[place.module], found.visits[""].inputs[-2:]
    tokens = (visit.inputs if place.before else visit.output)[1]
    return not fills_grid(tokens, image) or fills_grid(tokens - getattr(model, "num_prefix_tokens", 1), image)


def factory_arguments(model: nn.Module, name: str) -> dict[str, Any]:
    """Device and type of the weights nearest to a module that may have none itself, such as a dropout."""
    while True:
        for parameter in model.get_submodule(name).parameters():
            if parameter.is_floating_point():
                return {"device": parameter.device, "dtype": parameter.dtype}
        if not name:
            return {}
        name = name.rpartition(".")[0]


def _apply(model: nn.Module, kind: str, position: Position, block: Block, layers: Layers) -> list[Change]:
    found = survey(model)
    if kind != "cb_gate":  # which takes the first token
        refuse_causal(found, model)
    changes = []
    for place in _chosen(found, model, position, block, layers):
        module = model.get_submodule(place.module)
        factory = factory_arguments(model, place.module)
        first = _has_class_token(model, found, place)
        part = create_broadcast(kind, place.dim, layout=place.layout, class_token=first, **factory)
        padding = padding_around(model, place.module)
        where = f"{lineage(type(module))[-1].__name__}: {kind} at its {'front' if place.before else 'end'}"
        if place.before:
            graft(model, module, BroadcastBefore, broadcast_before=part, broadcast_before_padding=padding)
        else:
            graft(model, module, BroadcastAfter, broadcast=part, broadcast_padding=padding)
        changes.append(Change(place.module, where))
    return changes


def _chosen(found: Survey, model: nn.Module, position: Position, block: Block, layers: Layers) -> Iterator[Place]:
    for kind, places in (("mlp", mlp_places), ("attention", _attention_places)):
        if block in (kind, "both"):
            there = places(found, model, position)
            yield from (there[i] for i in resolve_layers(layers, len(there)))


@modification(summary="add the mean token to every token at the end of the MLP (Context Broadcasting)")
def cb(model: nn.Module, *, position: Position = "end", block: Block = "mlp", layers: Layers = "upper") -> list[Change]:
    """Broadcast the mean token; adds no parameter, and outputs change at once.

    Args:
        position: where in the block the mean is added
        block: in the MLP, in the attention, or in both
        layers: the blocks that are changed; the upper half, for deeper layers gain more
    """
    return _apply(model, "cb", position, block, layers)


@modification(summary="add the mean token, each channel by its own learned amount (CB_S)")
def cb_s(model: nn.Module, *, position: Position = "end", block: Block = "mlp", layers: Layers = "all") -> list[Change]:
    """Broadcast the mean token by learned amounts that start at zero.

    Args:
        position: where in the block the mean is added
        block: in the MLP, in the attention, or in both
        layers: the blocks that are changed
    """
    return _apply(model, "cb_s", position, block, layers)


@modification(summary="gate every token's channels by the class token (CB_gate)")
def cb_gate(
    model: nn.Module, *, position: Position = "end", block: Block = "mlp", layers: Layers = "upper"
) -> list[Change]:
    """Multiply every token by the class token plus one; the mean token stands in where there is no class token.

    Args:
        position: where in the block the gate is
        block: in the MLP, in the attention, or in both
        layers: the blocks that are changed
    """
    return _apply(model, "cb_gate", position, block, layers)


@modification(summary="gate by the class token and add the mean token (CB_hybrid)")
def cb_hybrid(
    model: nn.Module, *, position: Position = "end", block: Block = "mlp", layers: Layers = "upper"
) -> list[Change]:
    """The gate of cb_gate and the mean of cb together.

    Args:
        position: where in the block they are
        block: in the MLP, in the attention, or in both
        layers: the blocks that are changed
    """
    return _apply(model, "cb_hybrid", position, block, layers)
