"""Watching a model run once: which module runs, with what shapes, which attends, and which holds its residual sum.

Tensors carry their origin with them. One that was computed from the model's input is told from one made of weights
alone, so a product of two that come from the input is attention of some kind, with or without a softmax; and a softmax
of such a product is told from a softmax of anything else.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrefine.surgery.heads import HeadAxis
from vitrefine.surgery.tap import is_softmax_over_keys, sdpa_arguments

ATTENTION_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
PRODUCTS = (torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
ORIGIN = "_origin"  # attribute of a tensor: the modules whose products it was computed from; None if from no input


@dataclass
class Visit:
    """One module in one forward pass: the shapes of the first tensor it got and gave."""

    name: str
    module: nn.Module
    inputs: tuple[int, ...]
    output: tuple[int, ...] = ()
    of_input: bool = False  # it was given something that was computed from the model's input
    attends: bool = False  # by a softmax over keys
    mixes: bool = False  # brings tokens together in any way but convolution and pooling
    adds_input: bool = False  # its output has its own input in it: it holds the residual sum


@dataclass
class AttentionSite:
    """A module that attends; `maps` has the shape of the maps of each attention that one call of it computes."""

    name: str
    kind: str  # sdpa, softmax or mha (torch.nn.MultiheadAttention)
    maps: list[tuple[int, ...]] = field(default_factory=list)
    axis: HeadAxis = field(default_factory=HeadAxis)
    heads: int = 1
    from_products: bool = False  # of queries and keys
    odd: str = ""  # why these are no maps from tokens to tokens for all heads at once; empty for nearly all


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's or a function's arguments or output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def first_shape(value: Any) -> tuple[int, ...]:
    """The shape of the first tensor in a module's arguments or output."""
    return next((tuple(tensor.shape) for tensor in tensors_in(value) if tensor.ndim), ())


def _origins(tensors: list[Tensor]) -> list[frozenset[str]]:
    """The origins of those among the tensors that were computed from the input."""
    return [origin for tensor in tensors if (origin := getattr(tensor, ORIGIN, None)) is not None]


class ModuleMode(TorchFunctionMode):
    """Sees every function and, by `_enter` and `_leave`, every module of a model while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._leave, name)))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        raise NotImplementedError


class Watch(ModuleMode):
    """Writes down what happens while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.visits: dict[str, Visit] = {}
        self.attentions: dict[str, AttentionSite] = {}
        self._running: list[str] = []
        self._given: list[list[Tensor]] = []

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        if not self._running:
            for tensor in given:
                setattr(tensor, ORIGIN, frozenset())
        self.visits.setdefault(name, Visit(name, module, first_shape(given), of_input=bool(_origins(given))))
        self._running.append(name)
        self._given.append(given)
        if isinstance(module, nn.RNNBase) or (isinstance(module, nn.Linear) and self._mixes(first_shape(given))):
            self._note_mixing()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        given = self._given.pop()
        visit = self.visits[name]
        visit.output = visit.output or first_shape(output)
        # What a module computes may pass through functions that no mode sees, such as scripted ones; its products are
        # its own affair. One without weights is a step in what its owner computes.
        outputs = list(tensors_in(output))
        origin = frozenset[str]().union(*_origins([*given, *outputs]))
        if self._running and next(module.parameters(), None) is None:
            origin = frozenset(self._running[-1] if other == name else other for other in origin)
        for tensor in outputs if _origins(given) else ():
            setattr(tensor, ORIGIN, origin - {name})

    def _mixes(self, shape: tuple[int, ...]) -> bool:
        """Whether a linear layer that is given this shape brings tokens together."""
        if len(shape) != 3 or shape[1] == 1:
            return False
        *_, owner, _ = ["", *self._running]
        if ATTENTION_CLASS.search(type(self.visits[owner].module).__name__):
            return True  # additive attention leaves neither a softmax nor a product behind, only its name
        around = [self.visits[name].inputs for name in self._running[:-1]]
        tokens = {outer[1] for outer in around if len(outer) == 3 and outer[0] == shape[0] and outer[1] != shape[1]}
        return shape[2] in tokens  # it is given (B, channels, tokens)

    def _note_mixing(self) -> None:
        for name in self._running:
            self.visits[name].mixes = True

    def _note_softmax(self, shape: tuple[int, ...], origins: list[frozenset[str]]) -> None:
        owner = self._running[-1]
        if isinstance(self.visits[owner].module, nn.Softmax):  # a softmax as a module: its owner attends
            owner = self._running[-2]
        from_products = any(owner in origin for origin in origins)
        if from_products or shape[-2] > 1:  # one row of weights that are no products is a pooling
            self._note_attention("softmax", shape, owner, from_products)

    def _note_attention(self, kind: str, shape: tuple[int, ...], owner: str, from_products: bool = True) -> None:
        self._note_mixing()
        for name in self._running:
            self.visits[name].attends = True
        site = self.attentions.setdefault(owner, AttentionSite(owner, kind))
        site.maps.append(shape)
        site.from_products |= from_products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        origins = _origins(given)
        if func is F.scaled_dot_product_attention:
            named = sdpa_arguments(args, kwargs)
            shape = (*named["query"].shape[:-1], named["key"].shape[-2])
            self._note_attention("sdpa", shape, self._running[-1])
        elif func is F.multi_head_attention_forward:
            queries, batch = args[0].shape[:2]
            self._note_attention("mha", (batch, args[4], queries, args[1].shape[0]), self._running[-1])
        elif is_softmax_over_keys(func, args, kwargs):
            self._note_softmax(tuple(given[0].shape), origins)
        elif func in SUMS and any(a is b for a in given for b in self._given[-1]):
            self.visits[self._running[-1]].adds_input = True
        output = func(*args, **kwargs)
        if origins:
            origin = frozenset[str]().union(*origins)
            if func in PRODUCTS and len(origins) > 1:
                origin |= {self._running[-1]}
                if output.ndim >= 3 and 1 not in output.shape[-2:]:  # a single row or column is a pooling
                    self._note_mixing()
            # An assignment to a part of a tensor returns nothing: the tensor itself has a new origin.
            for tensor in tensors_in((output, args[0]) if func is Tensor.__setitem__ else output):
                setattr(tensor, ORIGIN, origin)
        return output
