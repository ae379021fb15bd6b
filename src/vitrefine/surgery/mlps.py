"""Finding the MLPs of a model among the modules that ran.

An MLP is a module that bears the name, or, where none does, the one that follows an attention and widens the channels
and narrows them again: a mobile network's inverted residual has the MLP's place and its two linear layers.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from vitrefine.surgery.watch import Visit

MLP_NAME = re.compile(r"mlp|ffn|feed_?forward|channel_mix", re.IGNORECASE)
TOKEN_MLP_NAME = re.compile(r"tokens?$", re.IGNORECASE)

Visits = dict[str, Visit]


@dataclass(frozen=True)
class MlpSite:
    """An MLP: the modules whose input is its front, whose input is its middle, and whose output is its end."""

    front: str
    middle: str
    end: str
    layout: str  # NLC, NHWC or NCHW
    dim: int
    hidden: int


def _pointwise(visits: Visits, within: str) -> list[Visit]:
    """Linear layers and 1×1 convolutions that ran inside a module on all its tokens, in order."""
    tokens = visits[within].inputs[2:]
    return [
        visit
        for name, visit in visits.items()
        if name.startswith(f"{within}.")
        and (isinstance(visit.module, nn.Linear) or (_is_pointwise(visit.module) and visit.inputs[2:] == tokens))
    ]


def _is_pointwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)


def _children(visits: Visits, name: str) -> list[str]:
    return [child for child in visits if child and child.rpartition(".")[0] == name and child != name]


def find_mlps(visits: Visits) -> Iterator[MlpSite]:
    """The MLPs by name; where no module bears the name, the feed-forwards by their place."""
    found: dict[str, MlpSite] = {}
    for name, visit in visits.items():
        parent, _, leaf = name.rpartition(".")
        if leaf == "intermediate" and f"{parent}.output.dense" in visits and not visit.attends:
            # Hugging Face splits the MLP in two, the second half of which adds the residual itself.
            end = f"{parent}.output.dropout" if f"{parent}.output.dropout" in visits else f"{parent}.output.dense"
            hidden = visits[f"{parent}.output.dense"].inputs[-1]
            found[name] = MlpSite(name, f"{parent}.output.dense", end, "NLC", visit.inputs[-1], hidden)
            continue
        named = MLP_NAME.search(leaf) or MLP_NAME.search(type(visit.module).__name__)
        if not named or visit.attends or not _is_mlp(visits, name):
            continue
        # The innermost module that qualifies is the MLP.
        for outer in [outer for outer in found if name.startswith(f"{outer}.")]:
            del found[outer]
        found[name] = _site(visits, name)
    if found:
        yield from {site.end: site for site in found.values()}.values()
    else:
        yield from {name: _site(visits, name) for name in _feed_forwards(visits)}.values()


def _is_mlp(visits: Visits, name: str) -> bool:
    """Tokens out as they came in, more than one, of more than one channel, and two linear layers or more on these."""
    visit, parent = visits[name], visits.get(name.rpartition(".")[0])
    if not visit.of_input or visit.inputs != visit.output or len(visit.inputs) not in (3, 4):
        return False
    if TOKEN_MLP_NAME.search(name) or (parent and _transposed(visit.inputs, parent.inputs)):
        return False
    linears = _pointwise(visits, name)
    if len(linears) < 2:
        return False
    _, channel = _layout(visit, linears)
    return math.prod(visit.inputs[1:]) > visit.inputs[channel] > 1


def _transposed(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] != shape[2] and (shape[0], shape[2], shape[1]) == other


def _layout(visit: Visit, linears: list[Visit]) -> tuple[str, int]:
    """The order of the axes, and which of them holds the channels."""
    if len(visit.inputs) == 3:
        return "NLC", -1
    return ("NCHW", 1) if isinstance(linears[0].module, nn.Conv2d) else ("NHWC", -1)


def _feed_forwards(visits: Visits) -> Iterator[str]:
    """What follows a module that mixes tokens, in its block or in the blocks around it, and widens and narrows."""
    mixing = [name for name, visit in visits.items() if visit.mixes]
    innermost = [name for name in mixing if not any(other.startswith(f"{name}.") for other in mixing)]
    order = {name: number for number, name in enumerate(visits)}
    for mixer in innermost:
        name = mixer
        while name:
            parent = name.rpartition(".")[0]
            later = [child for child in _children(visits, parent) if order[child] > order[mixer]]
            following = next((sibling for sibling in later if _pointwise(visits, sibling)), None)
            if following and not visits[following].mixes and _is_mlp(visits, following) and _widens(visits, following):
                yield following
                break
            name = parent


def _widens(visits: Visits, name: str) -> bool:
    site = _site(visits, name)
    return site.hidden > site.dim


def _site(visits: Visits, name: str) -> MlpSite:
    visit, linears = visits[name], _pointwise(visits, name)
    layout, channel = _layout(visit, linears)
    front, end = _branch(visits, name)
    front, end = _unrolled(visits, front, 0), _unrolled(visits, end, -1)
    return MlpSite(front, linears[-1].name, end, layout, visit.inputs[channel], linears[-1].inputs[channel])


def _branch(visits: Visits, name: str) -> tuple[str, str]:
    """The first and the last module of an MLP proper, without the residual sum that its module may hold."""
    if not _holds_residual(visits, name):
        return name, name
    holders = _holders(visits, name)
    if len(holders) == 1:
        return _branch(visits, holders[0])
    children = _children(visits, name)
    after = children[children.index(holders[-1]) + 1 :]
    dropout = after[0] if after and isinstance(visits[after[0]].module, nn.Dropout) else None
    return holders[0], dropout or holders[-1]


def _unrolled(visits: Visits, name: str, which: int) -> str:
    """The first or last child of a sequence: a sequence runs all its children, so none can be added to it."""
    while isinstance(visits[name].module, nn.Sequential) and (children := _children(visits, name)):
        name = children[which]
    return name


def _holds_residual(visits: Visits, name: str) -> bool:
    holders = _holders(visits, name)
    return visits[name].adds_input or (len(holders) == 1 and _holds_residual(visits, holders[0]))


def _holders(visits: Visits, name: str) -> list[str]:
    """The children that hold an MLP's linear layers."""
    linears = [linear.name for linear in _pointwise(visits, name)]
    return [
        child
        for child in _children(visits, name)
        if any(linear == child or linear.startswith(f"{child}.") for linear in linears)
    ]
