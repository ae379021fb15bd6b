"""What is put on a module while it is watched: each mixin writes down the attention that passes through it.

Most modules compute attention by a call that surgery's tap sees. Refined attention and LIT's attention hand queries and
keys to kernels of their own, which no tap sees; for these there are mixins that know where queries and keys are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.diagnose.call import Call, Refinement
from vitrefine.layers.attention import GlobalAttention, split_heads
from vitrefine.layers.official_inference import refine_officially
from vitrefine.layers.refined_attention import OfficialRefinedAttention, RefinedAttention
from vitrefine.ops.refined_attention import Mix, refine_maps_collapsed
from vitrefine.surgery.graft import Graft
from vitrefine.surgery.heads import HeadAxis
from vitrefine.surgery.padding import hide_padded_queries
from vitrefine.surgery.refine import Refined
from vitrefine.surgery.tap import AttentionTap

Record = Callable[[nn.Module, Call], None]  # who attended, and how; a copy of a model has the records of its original
OFFICIAL_REACH = 1  # the authors' kernel is 3×3


def refinement_of(mix: Mix, grid: tuple[int, int] | None = None) -> Refinement:
    """The paper's refinement; one that follows the image mixes keys only."""
    fixed = Mix(*(None if weight is None else weight.detach().float() for weight in mix))
    reach = 0 if mix.local is None or grid is not None else mix.local.shape[-1] // 2
    return Refinement(partial(refine_maps_collapsed, mix=fixed, grid=grid), reach)


class _Site:
    """What a tap hands attention to: it is written down and computed as it would have been."""

    def __init__(self, record: Callable[[Call], None]) -> None:
        self.record = record

    def attend_maps(self, scores: Tensor, maps: Tensor) -> Tensor:
        self.record(Call(written=maps.detach()))
        return maps

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, scale: float | None
    ) -> Tensor:
        self.record(Call(q.detach(), k.detach(), attn_mask, scale))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)


class Captured(Graft):
    """A module whose attention a tap can see."""

    captured: Record
    captured_axis: HeadAxis

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AttentionTap(_Site(partial(self.captured, self)), self.captured_axis):
            return super().forward(*args, **kwargs)


class CapturedRefined(Graft):
    """A module that surgery refined: it is handed queries and keys, or maps, with the heads apart already."""

    captured: Record
    captured_maps: list[tuple[Tensor, Tensor]]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, scale: float | None
    ) -> Tensor:
        refined: Any = super()
        out: Tensor = refined.attend(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
        if self.captured_maps:
            self._record_maps()
            return out
        # No map was made as a whole, so none is kept: they can be had again from these.
        if attn_mask is not None and q.shape[-2] == k.shape[-2]:
            attn_mask = hide_padded_queries(attn_mask)
        module: Any = self
        self.captured(
            self, Call(q.detach(), k.detach(), attn_mask, scale, refinement=refinement_of(module.refiner.mix()))
        )
        return out

    def attend_maps(self, scores: Tensor, maps: Tensor) -> Tensor:
        refined: Any = super()
        out: Tensor = refined.attend_maps(scores, maps)
        self._record_maps()
        return out

    def _refine(self, maps: Tensor, visible: Tensor | None) -> Tensor:
        refined: Any = super()
        after: Tensor = refined._refine(maps, visible)
        self.captured_maps.append((maps.detach(), after.detach()))
        return after

    def _record_maps(self) -> None:
        while self.captured_maps:
            before, after = self.captured_maps.pop(0)
            module: Any = self
            # Maps that it makes itself meet no values in a block that uses those of another.
            handed = module.shared_maps is not None and not module.makes_maps
            self.captured(self, Call(written=after, proper=False) if handed else Call(written=before, refined=after))


class CapturedNative(Graft):
    """Attention of a Refined-ViT, of the paper's form or the authors'."""

    captured: Record
    captured_qk: list[Tensor]

    @property
    def in_the_open(self) -> bool:  # type: ignore[override]
        """As without this mixin, which needs no tap: kernels are left to do their work."""
        return super().in_the_open

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        module: Any = super()
        q, k, v = module._qkv(x)
        self.captured_qk[:] = [q.detach(), k.detach()]
        return q, k, v

    def forward(self, x: Tensor, maps: Tensor | None = None, **options: Any) -> Any:
        out, handed = super().forward(x, maps, **options)
        module: Any = self
        q, k = self.captured_qk or (None, None)
        self.captured_qk.clear()
        if isinstance(self, OfficialRefinedAttention):
            if self.shared:
                assert maps is not None
                assert self.refiner is not None
                apply = partial(_in_evaluation, refiner=self.refiner, factor=self.scale)
                call = Call(written=maps.detach(), refinement=Refinement(apply, OFFICIAL_REACH), proper=False)
            else:
                changed = maps is not None or self.refiner is not None
                call = Call(q, k, refined=handed.detach() if changed else None)
            self.captured(self, call)
        elif q is not None:
            refinement = refinement_of(module.refiner.mix(), module.refiner.grid(options.get("grid")))
            self.captured(self, Call(q, k, attn_mask=options.get("attn_mask"), refinement=refinement))
        return out, handed


def _in_evaluation(maps: Tensor, refiner: nn.Sequential, factor: float) -> Tensor:
    """The authors' refiner by its running statistics, which looking at it must not move."""
    training = refiner.training
    refiner.eval()
    try:
        with torch.no_grad():
            return refine_officially(maps.to(next(refiner.parameters()).dtype), refiner, factor)
    finally:
        refiner.train(training)


class CapturedGlobal(Graft):
    """LIT's attention, whose relative positions are added inside a kernel."""

    captured: Record

    @property
    def in_the_open(self) -> bool:  # type: ignore[override]
        """As without this mixin, which needs no tap: kernels are left to do their work."""
        return super().in_the_open

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        module: Any = self
        projected: list[Tensor] = []
        hook = module.qkv.register_forward_hook(lambda _, __, output: projected.append(output.detach()))
        try:
            out: Tensor = super().forward(x, grid)
        finally:
            hook.remove()
        q, k, _ = (split_heads(part, module.num_heads) for part in projected[0].chunk(3, dim=-1))
        bias = None if module.position is None else module.position(grid).detach().float()[None]
        self.captured(self, Call(q, k, attn_mask=bias))
        return out


def mixin_for(module: nn.Module, axis: HeadAxis) -> tuple[type[Graft], dict[str, Any]]:
    """The mixin that sees a module's attention, and what it needs besides the place to write to."""
    if isinstance(module, Refined):
        return CapturedRefined, {"captured_maps": []}
    if isinstance(module, RefinedAttention | OfficialRefinedAttention):
        return CapturedNative, {"captured_qk": []}
    if isinstance(module, GlobalAttention):
        return CapturedGlobal, {}
    return Captured, {"captured_axis": axis}


def uses_handed_maps(module: nn.Module) -> bool:
    """Whether a module attends by the maps of another and refines them itself: it has no softmax of its own."""
    return isinstance(module, OfficialRefinedAttention) and module.shared
