"""`+less_attention`: no attention in the early stages of a pyramid (LIT, Section 3.1 and Table 5).

    X + Attn(LN(X)), X + MLP(LN(X))   becomes   X + MLP(LN(X))

What goes is the whole branch that the residual sum would add: the attention, the norm before it where nothing else
reads it, and whatever lies between the attention and the sum (a scale, or the norm of Swin v2, which would turn zero
into its bias). Zero reaches the sum, exactly. Attention that merges tokens from one stage to the next, and attention
that only the class token pays, belongs to no stage and stays.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.flow import Flow, follow
from vitrefine.surgery.graft import Change, Hollow, lineage, replace
from vitrefine.surgery.newcomer import inherit
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Stages, resolve_stages
from vitrefine.surgery.stages import Pyramid, find_stages
from vitrefine.surgery.survey import Survey, survey


class Nothing(Hollow):
    """Gives zeros of the shape of what it is given; in a tuple of `items` where the part that was here gave one."""

    def __init__(self, items: int | None = None) -> None:
        super().__init__()
        self.items = items

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(args[0] if args else next(iter(kwargs.values())))
        return zeros if self.items is None else (zeros, *[None] * (self.items - 1))


class Unchanged(Hollow):
    """Gives back what it is given."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x


@dataclass
class _Branch:
    stage: int
    kind: str  # the class that attends
    attention: str  # the module that holds it and nothing else
    items: int | None  # of the tuple that the attention gives
    before: list[str]
    after: list[str]


class _Kept(Exception):
    """Why an attention cannot be taken out."""


def _branch(found: Survey, flow: Flow, name: str, stage: int) -> _Branch:
    ends = flow.ends.get(name, set())
    if not ends or not all(flow.meetings[meeting].is_sum for meeting, _ in ends):
        raise _Kept("what it gives is not simply added to what it was given")
    branch = flow.branch(name)
    outer = next(other for other in branch if f"{name}.".startswith(f"{other}."))
    attention = next((n for n in (outer, name) if _gives_its_shape(found, flow, n, tuples=True)), None)
    if attention is None:
        raise _Kept("it gives more than a map of the shape that it was given")
    start = flow.steps[attention].time
    weighted = [n for n in branch if n != outer and next(found.visits[n].module.parameters(), None) is not None]
    before = [n for n in weighted if flow.steps[n].time < start and _gives_its_shape(found, flow, n)]
    after = [n for n in weighted if flow.steps[n].time > start]
    after += [] if attention == outer else _rest(found, flow, outer, attention)
    if not all(_gives_its_shape(found, flow, n) for n in after):
        raise _Kept(f"{after[-1]} between it and its residual sum changes the shape of the map")
    gives = flow.steps[attention].gives
    kind = lineage(type(found.visits[name].module))[-1].__name__
    return _Branch(stage, kind, attention, None if gives is None else len(gives), before, after)


def _rest(found: Survey, flow: Flow, outer: str, attention: str) -> list[str]:
    """The modules with weights that follow the attention inside the module that holds its whole branch."""
    inside = [n for n in flow.steps if n.startswith(f"{outer}.") and not f"{n}.".startswith(f"{attention}.")]
    later = [n for n in inside if flow.steps[n].time > flow.steps[attention].time]
    leaves = [n for n in later if not any(other.startswith(f"{n}.") for other in later)]
    return [n for n in leaves if next(found.visits[n].module.parameters(), None) is not None]


def _gives_its_shape(found: Survey, flow: Flow, name: str, *, tuples: bool = False) -> bool:
    visit, gives = found.visits[name], flow.steps[name].gives
    plain = gives is None or (tuples and gives[0] == "tensor" and "other" not in gives)
    return plain and visit.inputs == visit.output


def _stage_of(flow: Flow, pyramid: Pyramid, name: str) -> int | None:
    sums = [flow.meetings[meeting] for meeting, _ in flow.ends.get(name, ()) if flow.meetings[meeting].is_sum]
    if sums:
        return pyramid.stage_of(sums[0].tokens)
    return next((stage for stage, end in enumerate(pyramid.ended) if flow.steps[name].time < end), None)


def _find_branches(model: nn.Module, stages: Stages) -> list[_Branch]:
    found, kind = survey(model), type(model).__name__
    if not found.attentions:
        raise UserError(f"{kind} has no attention to take out: no softmax over keys happens in its forward pass")
    flow = follow(model)
    pyramid = find_stages(found, flow)
    if len(pyramid) < 2:
        raise UserError(f"{kind} is no pyramid: it works on its tokens at one resolution, so it has no early stages")
    chosen = resolve_stages(stages, len(pyramid))
    sites = {
        site.name: stage
        for site in found.attentions
        if found.visits[site.name].inputs == found.visits[site.name].output
        and (stage := _stage_of(flow, pyramid, site.name)) is not None
    }
    branches: dict[str, _Branch] = {}
    for name, stage in sites.items():
        if stage in chosen:
            try:
                branch = _branch(found, flow, name, stage)
            except _Kept as reason:
                attention = lineage(type(found.visits[name].module))[-1].__name__
                raise UserError(f"the {attention} in stage {stage + 1} of {kind} cannot go: {reason}") from None
            branches[branch.attention] = branch
    if not branches:
        attends = sorted({stage + 1 for stage in sites.values()})
        where = (
            f"only in {_spoken(attends)} of {len(pyramid)}" if attends else "only to merge tokens or for a class token"
        )
        raise UserError(
            f"{kind} has no attention to take out of {_spoken([s + 1 for s in chosen])}: it attends {where}"
        )
    last = len(pyramid) - 1
    if last in chosen and getattr(model, "global_pool", None) == "token" and len(sites) == len(found.attentions):
        raise UserError(
            f"the class token of {kind} sees the image by the attention of stage {last + 1} alone; "
            "leave that stage out, or create the model with global_pool=avg"
        )
    return list(branches.values())


def _spoken(stages: list[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


@modification(summary="take the attention out of the early stages of a pyramid, MLPs stay (LIT)")
def less_attention(model: nn.Module, *, stages: Stages = (1, 2)) -> list[Change]:
    """Take attention out; its weights go, and those of the norm that only it read.

    Args:
        stages: the stages that lose their attention, counted from 1 by resolution
    """
    changes = []
    for branch in _find_branches(model, stages):
        parts: dict[str, Hollow] = {branch.attention: Nothing(branch.items)}
        parts |= {name: Unchanged() for name in branch.before} | {name: Nothing() for name in branch.after}
        for name, hollow in parts.items():
            parent, _, leaf = name.rpartition(".")
            replace(model, model.get_submodule(parent), leaf, inherit(model.get_submodule(name), hollow))
        others = [name.rpartition(".")[2] for name in (*branch.before, *branch.after)]
        with_others = f" with its {', '.join(others)}" if others else ""
        changes.append(Change(branch.attention, f"{branch.kind}: taken out of stage {branch.stage + 1}{with_others}"))
    return changes
