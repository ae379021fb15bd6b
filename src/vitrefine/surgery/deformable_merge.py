"""`+dtm`: tokens merged where learned offsets point, in a pyramid that exists (LIT, Section 3.3).

`variant=retrofit` keeps the merging layer with its weights and deforms what it reads, so outputs do not change until
offsets have been learned. A convolution becomes a deformable one of its own kernel, stride and padding. Any other way
of merging (Swin's linear layer over 2×2 tokens, pooling, a strided residual block) is handed a map that was read again,
each 2×2 window at its own offsets.

`variant=paper` puts GELU(BN(DC(X))) in the place of the merging module; its weights are new.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.token_merging import KERNEL_SIZE, DeformableTokenMerging, OffsetConvolution
from vitrefine.ops.deformable_merge import deform_map, deformable_merge
from vitrefine.surgery.broadcast import factory_arguments
from vitrefine.surgery.flow import follow
from vitrefine.surgery.graft import Change, Graft, graft, lineage, replace
from vitrefine.surgery.merging import Merge, Place, find_merges
from vitrefine.surgery.newcomer import Newcomer, inherit
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Stages, resolve_stages
from vitrefine.surgery.stages import find_stages
from vitrefine.surgery.survey import survey

Grid = tuple[int, int]


class NewOffsets(Newcomer, OffsetConvolution):
    """Offsets that the model had not before."""


class DeformedConvolution(Graft):
    """A convolution whose taps are read at offsets."""

    offset: OffsetConvolution

    def sampling_offsets(self, x: Tensor) -> Tensor:
        """(B, 2·taps, h, w): dy, dx of each tap of this NCHW map."""
        return self.offset(x)

    def forward(self, x: Tensor) -> Tensor:
        conv: Any = self
        merged = deformable_merge(
            x.permute(0, 2, 3, 1),
            self.sampling_offsets(x),
            conv.weight,
            conv.bias,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
        )
        return merged.permute(0, 3, 1, 2).contiguous()  # some models view what a convolution gives them


def _to_nhwc(x: Tensor, layout: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if layout == "NLC":
        return x.unflatten(1, _grid(x.shape[1], [*args, *kwargs.values()]))
    return x.permute(0, 2, 3, 1) if layout == "NCHW" else x


def _from_nhwc(x: Tensor, layout: str) -> Tensor:
    if layout == "NLC":
        return x.flatten(1, 2)
    return x.permute(0, 3, 1, 2).contiguous() if layout == "NCHW" else x


def _grid(tokens: int, given: list[Any]) -> Grid:
    """Height and width of a map of tokens, which a model passes on beside it; a square one if it does not."""
    for value in given:
        if isinstance(value, tuple | list) and len(value) == 2 and value[0] * value[1] == tokens:
            return value[0], value[1]
    side = round(tokens**0.5)
    return side, side


def _pad_to_windows(x: Tensor) -> Tensor:
    """An NHWC map with a row and a column of zeros where a side is odd."""
    return F.pad(x, (0, 0, 0, x.shape[2] % KERNEL_SIZE, 0, x.shape[1] % KERNEL_SIZE))


class DeformedInput(Graft):
    """A module whose map is read again, 2×2 windows at offsets, before it sees it."""

    offset: OffsetConvolution
    map_layout: str

    def sampling_offsets(self, x: Tensor) -> Tensor:
        """(B, 8, H/2, W/2): dy, dx of each token of each 2×2 window of this NHWC map."""
        return self.offset(_pad_to_windows(x).permute(0, 3, 1, 2))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = _to_nhwc(x, self.map_layout, args, kwargs)
        moved = deform_map(tokens, self.sampling_offsets(tokens), KERNEL_SIZE)
        moved = moved[:, : tokens.shape[1], : tokens.shape[2]]
        return super().forward(_from_nhwc(moved, self.map_layout), *args, **kwargs)


class TokenMergingInPlace(Newcomer, DeformableTokenMerging):
    """DTM in the layout of the place it was put in.

    Its weights may come from a checkpoint that has them; where one has weights of the merging that was here instead,
    those are passed over.
    """

    def __init__(self, place: Place, **factory: Any) -> None:
        super().__init__(place.before.channels, place.after.channels, **factory)
        self.layouts = (place.before.layout, place.after.layout)
        self.rounds_down = place.before.height % KERNEL_SIZE == 1 and place.after.height * 2 < place.before.height

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = _to_nhwc(x, self.layouts[0], args, kwargs)
        merged = super().forward(x if self.rounds_down else _pad_to_windows(x))
        return _from_nhwc(merged, self.layouts[1])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if f"{prefix}offset.weight" not in state_dict:
            for key in [key for key in state_dict if key.startswith(prefix)]:
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _find(model: nn.Module, stages: Stages) -> list[Merge]:
    found, flow, kind = survey(model), follow(model), type(model).__name__
    pyramid = find_stages(found, flow)
    if len(pyramid) < 2:
        raise UserError(f"{kind} is no pyramid: it works on its tokens at one resolution and merges none")
    chosen = resolve_stages(stages, len(pyramid))
    merges, reasons = find_merges(found, flow, pyramid)
    for merge in merges:
        modules = [model.get_submodule(place.name) for place in (merge.innermost, merge.whole) if place]
        if any(isinstance(part, OffsetConvolution) for module in modules for part in module.modules()):
            raise UserError(f"{kind} merges deformably already, at {merge.innermost.name.removesuffix('.offset')}")
    reasons[0] = "stage 1 has the patches of the image itself, which nothing merged"
    missing = sorted(set(chosen) - {merge.stage for merge in merges})
    if missing and (stages != "all" or not merges):
        why = [reasons[stage] for stage in missing if stage or stages != "all"]
        raise UserError(f"{kind} has no merging that offsets could deform: {'; '.join(why)}")
    return [merge for merge in merges if merge.stage in chosen]


def _retrofit(model: nn.Module, place: Place) -> str:
    module, factory = model.get_submodule(place.name), factory_arguments(model, place.name)
    if lineage(type(module))[-1] is nn.Conv2d and _is_plain(module):
        conv: Any = module
        down, across = conv.kernel_size
        geometry = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
        offset = NewOffsets(conv.in_channels, 2 * down * across, conv.kernel_size, **geometry, **factory)
        graft(model, module, DeformedConvolution, offset=offset)
        return f"its {down}×{across} taps are read at learned offsets"
    offset = NewOffsets(place.before.channels, 2 * KERNEL_SIZE**2, KERNEL_SIZE, KERNEL_SIZE, **factory)
    graft(model, module, DeformedInput, offset=offset, map_layout=place.before.layout)
    return "its map is read at learned offsets, 2×2 windows each at their own"


def _is_plain(conv: Any) -> bool:
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


@modification(summary="merge tokens where learned offsets point (deformable token merging, LIT)")
def dtm(
    model: nn.Module, *, variant: Literal["retrofit", "paper"] = "retrofit", stages: Stages = "all"
) -> list[Change]:
    """Deform the merging between the stages of a pyramid.

    Args:
        variant: keep the merging layer and deform what it reads, or put LIT's merging in its place, whose weights are
            new and whose outputs change at once
        stages: the stages whose tokens are merged deformably, counted from 1 by resolution; the first has no merging
    """
    changes = []
    for place in _places(_find(model, stages), variant):
        was = lineage(type(model.get_submodule(place.name)))[-1].__name__
        if variant == "retrofit":
            what = _retrofit(model, place)
        else:
            parent, _, leaf = place.name.rpartition(".")
            new = TokenMergingInPlace(place, **factory_arguments(model, place.name))
            replace(model, model.get_submodule(parent), leaf, inherit(model.get_submodule(place.name), new))
            what = f"replaced by GELU(BN(DC)), {place.before.channels} → {place.after.channels} channels"
        changes.append(Change(place.name, f"{was}: {what}"))
    return changes


def _places(merges: list[Merge], variant: str) -> list[Place]:
    if variant == "retrofit":
        return [merge.innermost for merge in merges]
    for merge in merges:
        if merge.whole is None:
            raise UserError(
                f"{merge.innermost.name} adds up branches while it merges, so no one merging can take its place; "
                "variant=retrofit deforms what it reads"
            )
    return [merge.whole for merge in merges if merge.whole]
