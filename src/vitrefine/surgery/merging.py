"""Where a pyramid merges tokens: the modules whose output has half the height and width of their input.

They are looked for between the last sum of one stage and the blocks of the next, so neither the patches of
the image itself nor the reduced maps inside an attention are taken for merging.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vitrefine.surgery.flow import Flow
from vitrefine.surgery.maps import TokenMap, read_maps
from vitrefine.surgery.stages import Pyramid
from vitrefine.surgery.survey import Survey


@dataclass(frozen=True)
class Place:
    """A module that halves a map, and how the map is laid out on its two sides."""

    name: str
    before: TokenMap
    after: TokenMap


@dataclass(frozen=True)
class Merge:
    """The way from one stage to the next."""

    stage: int  # that it leads to, from 0
    innermost: Place  # the smallest module that does all of it
    whole: (
        Place | None
    )  # the largest that does nothing else, map in and map out; None where branches add up in all of it


def find_merges(found: Survey, flow: Flow, pyramid: Pyramid) -> tuple[list[Merge], dict[int, str]]:
    """The uniform merges of a pyramid in order; for stages to which none leads, why, in words."""
    halving = {name: place for name in found.visits if name and (place := _halves(found, flow, name))}
    inside = tuple(f"{site.name}." for site in found.attentions)
    merges: list[Merge] = []
    reasons: dict[int, str] = {}
    for stage in range(1, len(pyramid)):
        steps = {
            name: place
            for name, place in halving.items()
            if not name.startswith(inside)
            and pyramid.stage_of(place.before.height * place.before.width) == stage - 1
            and pyramid.stage_of(place.after.height * place.after.width) == stage
        }
        after = {name: place for name, place in steps.items() if flow.steps[name].time > pyramid.ended[stage - 1]}
        steps = after or steps  # a model may come back to a stage that it left
        if not steps:
            reasons[stage] = f"no module of its own merges the tokens of stage {stage} into those of stage {stage + 1}"
        for root in _outermost(list(steps)):
            chain = list(_descend(steps, root))
            while len(chain) > 1 and _is_branch(flow, chain[-1]):
                chain.pop()  # the other branch merges too, though by no module that would show it
            innermost = chain[-1]
            parallel = _outermost([name for name in steps if name.startswith(f"{innermost}.")])
            if any(found.visits[name].attends for name in (parallel if len(parallel) > 1 else [innermost])):
                reasons[stage] = f"{innermost} merges the tokens of stage {stage} inside its attention"
                continue
            whole = next((steps[name] for name in chain if _does_nothing_else(found, flow, name)), None)
            merges.append(Merge(stage, steps[innermost], whole))
    return merges, reasons


def _halves(found: Survey, flow: Flow, name: str) -> Place | None:
    visit = found.visits[name]
    pairs = [(a, b) for a in read_maps(visit.inputs, flow.image) for b in read_maps(visit.output, flow.image)]
    # Where a shape can be read in two ways, modules that keep the layout come first.
    for before, after in sorted(pairs, key=lambda pair: pair[0].layout != pair[1].layout):
        if _is_half(before.height, after.height) and _is_half(before.width, after.width):
            return Place(name, before, after)
    return None


def _is_half(before: int, after: int) -> bool:
    return after < before and after in (before // 2, (before + 1) // 2)


def _outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _descend(steps: dict[str, Place], name: str) -> Iterator[str]:
    """From a module inwards, as long as one module in it does all of the merging."""
    yield name
    inner = _outermost([other for other in steps if other.startswith(f"{name}.")])
    if len(inner) == 1:
        yield from _descend(steps, inner[0])


def _is_branch(flow: Flow, name: str) -> bool:
    """Whether the next sum adds something to a module's output that did not come from it."""
    after = flow.steps[name].time
    first = next((i for i, m in enumerate(flow.meetings) if m.is_sum and m.time > after), None)
    return any(meeting == first for meeting, _ in flow.ends.get(name, ()))


def _does_nothing_else(found: Survey, flow: Flow, name: str) -> bool:
    step = flow.steps[name]
    alone = step.takes == 1 and step.gives is None
    return alone and not found.visits[name].attends and not flow.sums_in(name)
