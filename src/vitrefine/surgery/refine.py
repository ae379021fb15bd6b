"""`+refiner`, `+dla`, `+expansion`, `+talking_heads`: refined attention maps in a model that exists.

The attention module keeps its projections, biases, masks and names; the tap hands its attention to
`ops.refined_attention`, with the weights of a `Refiner` that becomes its child and starts as the identity.
"""

import math
import threading
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.official_inference import refine_officially
from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.refiner import Refiner
from vitrefine.ops.refined_attention import (
    aggregate,
    attention_maps,
    refine_maps_collapsed,
    refined_attention,
    refined_attention_and_maps,
    visible_pairs,
)
from vitrefine.surgery.graft import Change, Graft, graft, lineage
from vitrefine.surgery.heads import HeadAxis
from vitrefine.surgery.multihead import explicit_multihead
from vitrefine.surgery.padding import hide_padded_queries, is_told_of_padding, real_queries_of_scores
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Layers, resolve_layers
from vitrefine.surgery.survey import AttentionSite, Survey, refuse_causal, survey
from vitrefine.surgery.tap import AttentionTap


class SharedMaps:
    """Maps on their way from the block that made them to the blocks that use them again.

    A model may run in several threads at once, so each has its own maps. A backward pass may have threads of its own;
    where it runs a block again, that block uses the maps of the last forward pass.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._last: Tensor | None = None
        self._differentiable = False

    @property
    def maps(self) -> Tensor | None:
        if not _in_backward_pass():
            return getattr(self._here, "maps", None)
        if not self._differentiable:
            raise UserError(
                "the maps to be shared were made without gradients; activation checkpointing takes "
                "use_reentrant=False, and a backward pass right after each forward pass"
            )
        return self._last

    @maps.setter
    def maps(self, maps: Tensor) -> None:
        if not _in_backward_pass():
            self._here.maps = self._last = maps
            self._differentiable = torch.is_grad_enabled()

    def __reduce__(self) -> tuple[type["SharedMaps"], tuple[()]]:
        """Empty: a copy of a model has not run yet, and maps that belong to a graph cannot be copied."""
        return SharedMaps, ()


def _in_backward_pass() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Refined(Graft):
    """Attention whose maps pass through `refiner`."""

    refiner: nn.Module
    head_axis: HeadAxis
    prefix_tokens: int
    may_be_padded: bool
    shared_maps: SharedMaps | None
    makes_maps: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AttentionTap(self, self.head_axis):
            return super().forward(*args, **kwargs)

    def _refine(self, maps: Tensor, visible: Tensor | None) -> Tensor:
        if self.shared_maps is not None and not self.makes_maps:
            shared = self.shared_maps.maps
            assert shared is not None, "the block that makes the shared maps has not run"
            # Swin's next block has other windows: what it may not see, the one before may have seen.
            return shared if visible is None else shared.masked_fill(~visible, 0)
        if isinstance(self.refiner, Refiner):
            grid = self._grid(maps.shape[-1]) if _is_spatial(self.refiner) else None
            maps = refine_maps_collapsed(maps, self.refiner.mix(), grid=grid)
        else:
            assert isinstance(self.refiner, nn.Sequential)
            maps = refine_officially(maps, self.refiner)
        maps = maps if visible is None else maps.masked_fill(~visible, 0)
        if self.shared_maps is not None:
            self.shared_maps.maps = maps
        return maps

    def _grid(self, keys: int) -> tuple[int, int]:
        side = math.isqrt(keys - self.prefix_tokens)
        if side * side != keys - self.prefix_tokens:
            raise UserError(f"constraint=spatial needs a square image; {keys} keys make no square of patches")
        return side, side

    def attend_maps(self, scores: Tensor, maps: Tensor) -> Tensor:
        if self.may_be_padded and maps.shape[-2] == maps.shape[-1]:
            maps = maps.masked_fill(~real_queries_of_scores(scores), 0)
        return self._refine(maps, visible_pairs(scores))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, scale: float | None
    ) -> Tensor:
        if attn_mask is not None and q.shape[-2] == k.shape[-2]:
            attn_mask = hide_padded_queries(attn_mask)
        if isinstance(self.refiner, Refiner) and not _is_spatial(self.refiner):
            options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "scale": scale}
            mix = self.refiner.mix()
            if self.shared_maps is None:
                return refined_attention(q, k, v, mix, **options)
            out, self.shared_maps.maps = refined_attention_and_maps(q, k, v, mix, **options)
            return out
        visible = None if attn_mask is None else visible_pairs(attn_mask)
        maps = self._refine(attention_maps(q, k, attn_mask=attn_mask, scale=scale), visible)
        return aggregate(maps, v, dropout_p=dropout_p)


def _refinable(found: Survey, model: nn.Module) -> list[AttentionSite]:
    """The attentions that can be refined; a `UserError` with the reason where there is none."""
    if not found.attentions:
        raise UserError(f"{type(model).__name__} has no attention: no softmax over keys happens in its forward pass")
    sites = [site for site in found.attentions if not site.odd]
    reasons = [f"{lineage(type(found.visits[s.name].module))[-1].__name__}: {s.odd}" for s in found.attentions if s.odd]
    if not sites:
        raise UserError(f"no attention of {type(model).__name__} can be refined ({'; '.join(dict.fromkeys(reasons))})")
    return sites


def _is_spatial(refiner: nn.Module) -> bool:
    return isinstance(refiner, Refiner) and refiner.constraint == "spatial"


def _prefix_tokens(model: nn.Module, found: Survey, site: AttentionSite) -> int:
    """How many keys come before those of the patches, as class and register tokens do; not all stages have them."""
    keys, (height, width) = site.maps[0][-1], found.visits[""].inputs[-2:]
    said = getattr(model, "num_prefix_tokens", 0)
    if said < keys and math.isqrt(keys - said) ** 2 == keys - said:
        return int(said)
    if height != width:
        raise UserError(f"constraint=spatial needs a square image; {keys} keys make no square of patches")
    return keys - math.isqrt(keys) ** 2


def _apply(
    model: nn.Module, layers: Layers, make: Any, *, kernel_size: int = 1, share: int = 0, what: str
) -> list[Change]:
    found = survey(model)
    sites = _refinable(found, model)
    if kernel_size > 1:  # it reaches into the map of the next query, which may have seen more
        refuse_causal(found, model)
    chosen = [sites[i] for i in resolve_layers(layers, len(sites))]
    changes: list[Change] = []
    bus: SharedMaps | None = None
    owner: AttentionSite | None = None
    for number, site in enumerate(chosen):
        module = model.get_submodule(site.name)
        makes_maps = number % (share + 1) == 0
        if makes_maps:
            bus, owner = (SharedMaps() if share else None), site
        elif owner is not None and owner.maps != site.maps:
            raise UserError(f"share={share}: {site.name} attends with other shapes than {owner.name} before it")
        explicit_multihead(model, module)
        refiner = make(site.heads) if makes_maps else nn.Identity()
        graft(
            model,
            module,
            Refined,
            refiner=refiner,
            head_axis=site.axis,
            prefix_tokens=_prefix_tokens(model, found, site) if _is_spatial(refiner) else 0,
            may_be_padded=is_told_of_padding(model, site.name),
            shared_maps=bus,
            makes_maps=makes_maps,
        )
        used = what if makes_maps or owner is None else f"uses the maps of {owner.name}"
        changes.append(Change(site.name, f"{lineage(type(module))[-1].__name__}: {used}"))
    return changes


@modification(summary="expand, convolve and reduce the attention maps (Refiner)")
def refiner(
    model: nn.Module,
    *,
    expansion: int = 3,
    kernel_size: int = 3,
    constraint: Literal["spatial", "row+col"] | None = None,
    share: int = 0,
    variant: Literal["paper", "official"] = "paper",
    layers: Layers = "all",
) -> list[Change]:
    """Refine attention maps.

    Args:
        expansion: maps in between for each head
        kernel_size: side of the local kernels; 1 leaves the convolution out
        constraint: where a kernel may reach: any neighbour in the map, neighbours in the image, or a cross
        share: how many attentions after each one use its refined maps again; above 0 outputs change at once
        variant: the paper's linear form, or the authors' with batch norms, whose outputs change at once
        layers: the attentions that are changed
    """
    if share < 0:
        raise UserError(f"share={share} is too small; 0 shares no maps")
    if variant == "official":
        if (kernel_size, constraint) != (3, None):
            raise UserError("variant=official has kernel_size 3 and no constraint; leave those options out")

        def make(heads: int) -> nn.Module:
            return nn.Sequential(OfficialRefiner(heads, expansion=expansion), nn.BatchNorm2d(heads))
    else:

        def make(heads: int) -> nn.Module:
            return Refiner(heads, expansion=expansion, kernel_size=kernel_size, constraint=constraint or "none")

    what = f"maps refined, expansion {expansion}, kernel {kernel_size}×{kernel_size}"
    return _apply(model, layers, make, kernel_size=kernel_size, share=share, what=what)


@modification(summary="convolve each attention map (distributed local attention)")
def dla(
    model: nn.Module,
    *,
    kernel_size: int = 3,
    constraint: Literal["spatial", "row+col"] | None = None,
    layers: Layers = "all",
) -> list[Change]:
    """Convolve attention maps, each head by itself.

    Args:
        kernel_size: side of the local kernels
        constraint: where a kernel may reach: any neighbour in the map, neighbours in the image, or a cross
        layers: the attentions that are changed
    """

    def make(heads: int) -> nn.Module:
        return Refiner(heads, expansion=0, kernel_size=kernel_size, constraint=constraint or "none")

    return _apply(model, layers, make, kernel_size=kernel_size, what=f"maps convolved {kernel_size}×{kernel_size}")


@modification(summary="expand the attention maps to more heads and reduce them again")
def expansion(model: nn.Module, *, ratio: int = 3, layers: Layers = "all") -> list[Change]:
    """Mix attention maps across heads by way of more maps.

    Args:
        ratio: maps in between for each head
        layers: the attentions that are changed
    """
    return _apply(
        model, layers, lambda heads: Refiner(heads, expansion=ratio, kernel_size=1), what=f"maps expanded ×{ratio}"
    )


@modification(summary="mix the attention maps across heads after the softmax (talking heads)")
def talking_heads(model: nn.Module, *, layers: Layers = "all") -> list[Change]:
    """Mix attention maps across heads by one square matrix.

    Args:
        layers: the attentions that are changed
    """
    return _apply(model, layers, lambda heads: Refiner(heads, expansion=1, kernel_size=1), what="heads mixed")
