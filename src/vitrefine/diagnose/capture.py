"""Catching attention where it happens: queries and keys of fused attention, maps where a model writes them out.

    with capture(model) as attentions:
        model(images)
    attentions[0].calls[0].maps()

Taps are put on for as long as the context lasts; the model is then what it was before. Nothing is asked of the model:
fused attention, which shows its maps to no hook, is caught like any other, under autocast too. A compiled model runs
uncompiled inside the context, and so does one that is compiled inside it; a wrapped one (DDP) is looked into.
Of refined attention the maps are there before and after refinement.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from timm.utils.model import unwrap_model
from torch import nn

from vitrefine.diagnose.call import Call
from vitrefine.diagnose.taps import Record, mixin_for, uses_handed_maps
from vitrefine.errors import UserError
from vitrefine.surgery.graft import graft, surgery_of, undo_to
from vitrefine.surgery.multihead import explicit_multihead
from vitrefine.surgery.selection import Layers, resolve_layers
from vitrefine.surgery.survey import AttentionSite, Survey, survey

RECORD = "_vitrefine"


@dataclass
class Attention:
    """An attention module, and what it computed while it was watched: a call for each time it ran."""

    name: str
    heads: int
    calls: list[Call] = field(default_factory=list)
    runs: int = 0
    number: int = 0  # among all attentions of the model, from 0

    def __str__(self) -> str:
        shapes = ", ".join("×".join(map(str, call.shape)) for call in self.calls)
        return f"{self.name}: {self.heads} heads, {self.runs} runs" + (f", maps of {shapes}" if shapes else "")


OnCall = Callable[[Attention, Call], None]


@contextmanager
def capture(model: nn.Module, layers: Layers = "all", *, on_call: OnCall | None = None) -> Iterator[list[Attention]]:
    """Write down the attention of every module that attends from tokens to tokens, in the order in which they run.

    Args:
        model: Any model: compiled or not, wrapped or not, with any modification.
        layers: Which attentions, counted from 0: `"all"`, `"upper"`, `3`, `[0, 3, 6]`.
        on_call: Given each call when it happens, which is then not kept: for statistics that are streamed.
    """
    inner = unwrap_model(model)
    sites = _sites(inner)
    numbers = resolve_layers(layers, len(sites))
    chosen = [sites[number] for number in numbers]
    attentions = [Attention(sites[number].name, sites[number].heads, number=number) for number in numbers]
    operated = RECORD in vars(inner)
    before = len(surgery_of(inner).undo)
    ran: list[bool] = []
    hook = inner.register_forward_hook(lambda module, *_: ran.append(True) if module is inner else None)
    try:
        for site, attention in zip(chosen, attentions, strict=True):
            module = inner.get_submodule(site.name)
            explicit_multihead(inner, module)
            mixin, parts = mixin_for(module, site.axis)
            graft(inner, module, mixin, captured=_recorder(module, attention, on_call), **parts)
        with torch.compiler.set_stance("force_eager"):
            yield attentions
        if ran and not any(attention.runs for attention in attentions):
            raise UserError(f"{type(inner).__name__} ran, but none of its {len(attentions)} attentions could be seen")
    finally:
        hook.remove()
        undo_to(inner, before)
        if not operated:
            object.__delattr__(inner, RECORD)


def _recorder(watched: nn.Module, attention: Attention, on_call: OnCall | None) -> Record:
    def record(module: nn.Module, call: Call) -> None:
        if module is not watched:
            return  # a copy, made to find something out
        attention.runs += 1
        if on_call is None:
            attention.calls.append(call)
        else:
            on_call(attention, call)

    return record


def _sites(model: nn.Module) -> list[AttentionSite]:
    """The attentions in the order in which they run; a `UserError` with the reason where there is none."""
    found = survey(model)
    sites = [site for site in found.attentions if not site.odd]
    if not sites:
        reasons = dict.fromkeys(site.odd for site in found.attentions)
        why = "; ".join(reasons) or "no softmax over keys happens in its forward pass"
        raise UserError(f"{type(model).__name__} has no attention to look at: {why}")
    return _with_handed_maps(model, found, sites)


def _with_handed_maps(model: nn.Module, found: Survey, sites: list[AttentionSite]) -> list[AttentionSite]:
    """Blocks that refine the maps of others have no softmax by which they could have been found."""
    own = {site.name: site for site in sites}
    every: list[AttentionSite] = []
    for name in found.visits:
        module = model.get_submodule(name)
        if name in own:
            every.append(own[name])
        elif uses_handed_maps(module):
            every.append(AttentionSite(name, "handed", heads=module.num_heads))  # type: ignore[arg-type]
    return every
