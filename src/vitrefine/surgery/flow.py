"""Following tensors through a model: which modules lie on which branch, and where a branch joins the rest.

Every tensor carries the names of the modules through which all of it went. Where two tensors meet that went through
different modules, those that are behind one of them only have come to the end of their branch: in `x + attn(norm(x))`
norm and attn end at the sum, as its second part. Modules that end at the same places, as the same part, are one branch:
so what belongs to an attention (the norm before it, the norm or the scale after it) is told from what does not, and no
family is known by name.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.surgery.maps import layout_of
from vitrefine.surgery.rehearsal import rehearse
from vitrefine.surgery.watch import SUMS, ModuleMode, tensors_in

SHAPES_ONLY = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, Tensor.new_zeros, Tensor.new_ones,
               Tensor.new_empty, Tensor.new_full, Tensor.new_tensor)  # fmt: skip
THROUGH = "_through"  # attribute of a tensor: the modules all of it went through; absent if it is made of weights alone


@dataclass(frozen=True)
class Meeting:
    """Two tensors become one, in the forward of the module `owner`."""

    time: int
    owner: str
    shape: tuple[int, ...]
    tokens: int  # of one image, class tokens aside, windows and folded patches taken together; 0 if it is no map
    is_sum: bool  # of two tensors of the same shape


@dataclass
class Step:
    """One module in one forward pass."""

    time: int  # when it was entered; of the same clock as `Meeting.time`
    takes: int  # how many tensors
    gives: tuple[str, ...] | None = None  # the kinds of the items of a tuple; None for a tensor by itself


@dataclass
class Flow:
    """Who met whom in one forward pass."""

    prefix_tokens: int  # class and register tokens, in those stages that have them
    image: tuple[int, int] | None = None  # its height and width; None for a model of text
    batch: int = 1
    meetings: list[Meeting] = field(default_factory=list)
    # Where a module's branch ends: indexes of meetings, and of the tensors that meet there.
    ends: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    steps: dict[str, Step] = field(default_factory=dict)

    def branch(self, name: str) -> list[str]:
        """The modules that end where this one does, in the order of their entrance; those inside others left out."""
        same = [other for other in self.steps if self.ends.get(other) == self.ends.get(name)]
        return [other for other in same if not any(other.startswith(f"{outer}.") for outer in same if outer)]

    def sums_in(self, name: str) -> bool:
        """Whether branches are added up in a module or in what it holds."""
        return any(m.is_sum and (m.owner == name or m.owner.startswith(f"{name}.")) for m in self.meetings)


def _kind(item: Any) -> str:
    return "tensor" if isinstance(item, Tensor) else "none" if item is None else "other"


class _Follow(ModuleMode):
    """Fills in a `Flow` while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model, self.flow, self._time = model, Flow(prefix_tokens=getattr(model, "num_prefix_tokens", 0)), 0
        self._running: list[tuple[str, list[Tensor]]] = []

    def __enter__(self) -> Flow:
        super().__enter__()
        return self.flow

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        if not self._running:
            self._begin(given)
        self._time += 1
        active = [tensor for tensor in given if hasattr(tensor, THROUGH)]
        self.flow.steps.setdefault(name, Step(self._time, len(active)))
        self._running.append((name, active))

    def _begin(self, inputs: list[Tensor]) -> None:
        images = [tensor.shape for tensor in inputs if tensor.ndim == 4]
        self.flow.image = (images[0][2], images[0][3]) if images else None
        self.flow.batch = inputs[0].shape[0]
        for tensor in inputs:
            setattr(tensor, THROUGH, frozenset())

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        _, given = self._running.pop()
        if isinstance(output, tuple | list):
            self.flow.steps[name].gives = tuple(map(_kind, output))
        elif not isinstance(output, Tensor):
            self.flow.steps[name].gives = ("other",)
        for tensor in tensors_in(output) if given else ():
            if any(tensor is g for g in given):
                continue  # a module that gave back what it was given left no mark on it
            before = getattr(tensor, THROUGH, None)
            # Nor do functions that no mode sees, such as scripted ones.
            before = frozenset.intersection(*(getattr(g, THROUGH) for g in given)) if before is None else before
            setattr(tensor, THROUGH, before | {name})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        active = [tensor for tensor in tensors_in((args, kwargs)) if hasattr(tensor, THROUGH)]
        output = func(*args, **kwargs)
        if not active or func in SHAPES_ONLY:
            return output
        paths = [getattr(tensor, THROUGH) for tensor in active]
        common = frozenset.intersection(*paths)
        if any(path != common for path in paths):
            self._meet(func, active)
            for part, path in enumerate(paths):
                for name in path - common:
                    self.flow.ends[name].add((len(self.flow.meetings) - 1, part))
        # An assignment to a part of a tensor returns nothing: the tensor itself has changed.
        for tensor in tensors_in((output, args[0]) if func is Tensor.__setitem__ else output):
            setattr(tensor, THROUGH, common)
        return output

    def _meet(self, func: Any, active: list[Tensor]) -> None:
        owner, shape = self._running[-1][0], tuple(active[0].shape)
        is_sum = func in SUMS and len(active) == 2 and active[0].shape == active[1].shape
        tokens = self._count_tokens(shape, owner) if is_sum and len(shape) in (3, 4) else 0
        self._time += 1
        self.flow.meetings.append(Meeting(self._time, owner, shape, tokens, is_sum))

    def _count_tokens(self, shape: tuple[int, ...], owner: str) -> int:
        layout = layout_of(shape, self.flow.image, self.model.get_submodule(owner))
        tokens = math.prod(shape) // (shape[1 if layout == "NCHW" else -1] * self.flow.batch)
        return max(tokens - self.flow.prefix_tokens, 0) if layout == "NLC" else tokens


def follow(model: nn.Module) -> Flow:
    """Follow one forward pass of a copy of the model; the model itself is neither run nor changed."""
    return rehearse(model, _Follow)
