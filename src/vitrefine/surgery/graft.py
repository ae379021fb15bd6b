"""Changing a module in place, so that names, weights and everything that points at it stay as they are.

A graft gives one module a subclass of its own class, made on the spot: `class (Mixin, Original)`. The mixin's forward
wraps the original's by `super().forward`, and the parts that it needs become children of the module. Grafts stack.
A replacement puts another module in the place of a child. Both are written down in the model's `Surgery`, from which
`strip` undoes them in reverse order, down to the same objects.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitrefine.errors import UserError
from vitrefine.surgery.spec import Call

RECORD = "_vitrefine"  # attribute of a model that has been operated on


class Graft(nn.Module):
    """Base of the mixins: what makes a class made on the spot survive pickling and deep copies."""

    in_the_open = True  # layers of ours then attend by PyTorch's functions, which a tap sees

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (lineage(type(self)),), self.__getstate__()


_made: dict[tuple[type, type], type[nn.Module]] = {}  # one class for a mixin and an original, however often grafted


def _extended(mixin: type, original: type) -> type[nn.Module]:
    if (mixin, original) not in _made:
        name = f"{mixin.__name__}{original.__name__}"
        _made[mixin, original] = type(name, (mixin, original), {"__module__": original.__module__})
    return _made[mixin, original]


def lineage(kind: type) -> tuple[type, ...]:
    """The mixins of a grafted class, outermost first, and the class that was there before them."""
    mixins = []
    while issubclass(kind, Graft):
        mixin, kind = kind.__bases__
        mixins.append(mixin)
    return (*mixins, kind)


def _class_of(line: tuple[type, ...]) -> type[nn.Module]:
    *mixins, kind = line
    for mixin in reversed(mixins):
        kind = _extended(mixin, kind)
    return kind


def _revive(line: tuple[type, ...]) -> nn.Module:
    module: nn.Module = object.__new__(_class_of(line))
    return module


@dataclass(frozen=True)
class Change:
    """One thing that surgery did: to which module, and what, in words."""

    where: str
    what: str


@dataclass
class Surgery:
    """What was done to a model, and how to undo it."""

    modifications: list[Call] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    undo: list[tuple[str, nn.Module, Any]] = field(default_factory=list)
    base: Any = None  # the spec's base call, where the model was created from a spec


def surgery_of(model: nn.Module) -> Surgery:
    """The record of a model; an empty one is put there if nothing was done to it yet."""
    if RECORD not in vars(model):
        object.__setattr__(model, RECORD, Surgery())
    record: Surgery = vars(model)[RECORD]
    return record


def graft(model: nn.Module, module: nn.Module, mixin: type[Graft], **parts: Any) -> None:
    """Give `module` the behaviour of `mixin`; `parts` become its children and attributes."""
    for name in parts:
        if hasattr(module, name):
            what = f"{name} was put there before" if isinstance(module, Graft) else f"it has a {name} of its own"
            raise UserError(f"{lineage(type(module))[-1].__name__} cannot be changed like this twice: {what}")
    if "forward" in vars(module):  # accelerate's hooks do this, and so do patches by hand
        raise UserError(
            f"a {type(module).__name__} was given a forward that is not its class's, which would hide any change; "
            "take that off, and put it on again when the model is changed"
        )
    original = type(module)
    module.__class__ = _extended(mixin, original)
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _follow(module, part)
        setattr(module, name, part)
    # The lineage, not the class: one made on the spot cannot be pickled.
    surgery_of(model).undo.append(("graft", module, (lineage(original), tuple(parts))))


def replace(model: nn.Module, parent: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` in the place of a child; the old one is kept aside for `strip`."""
    old = parent.get_submodule(name)
    _follow(old, new)
    setattr(parent, name, new)
    surgery_of(model).undo.append(("replace", parent, (name, old)))


def _follow(old: nn.Module, new: nn.Module) -> None:
    """New parts work where, and as, the module they join does."""
    parameter = next((p for p in old.parameters() if p.is_floating_point()), None)
    if parameter is not None and not any(p.is_meta for p in new.parameters()):
        new.to(parameter.device, parameter.dtype)
    elif parameter is not None and not parameter.is_meta:
        new.to_empty(device=parameter.device)
    new.train(old.training)


def undo_to(model: nn.Module, length: int = 0) -> None:
    """Take back what was done after the first `length` steps, the newest first."""
    record = surgery_of(model)
    while len(record.undo) > length:
        kind, module, rest = record.undo.pop()
        if kind == "graft":
            line, parts = rest
            for name in parts:
                delattr(module, name)
            module.__class__ = _class_of(line)
        else:
            name, old = rest
            _match(old, module)
            setattr(module, name, old)


def _match(old: nn.Module, parent: nn.Module) -> None:
    """A part kept aside missed every move of the model: it follows now."""
    like = next((p for p in parent.parameters() if p.is_floating_point()), None)
    if like is not None:
        old.to(like.device, like.dtype)
    old.train(parent.training)


def refuse_wrapper(model: nn.Module) -> None:
    """What was done to a model is written down in the model itself, not in what wraps it."""
    if isinstance(model, nn.DataParallel | DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise UserError(f"{type(model).__name__} wraps the model that is to be changed; change that, and wrap it then")


def _is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def strip(model: nn.Module) -> nn.Module:
    """The original model back, bit for bit; it is changed in place and returned."""
    refuse_wrapper(model)
    for kind, _, rest in surgery_of(model).undo:
        if kind == "replace" and any(p.is_meta for p in rest[1].parameters()) and not _is_meta(model):
            raise UserError(
                f"{rest[0]} was taken out before this model was saved, so its weights are in no checkpoint: "
                "create the original from its own weights"
            )
    undo_to(model)
    base = surgery_of(model).base
    object.__delattr__(model, RECORD)
    if base is not None:  # what it was created from is still true
        surgery_of(model).base = base
    return model


class Hollow(nn.Module):
    """Stands where a part was taken out, and takes no notice of that part's weights in a checkpoint."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Weights of the part that was here are expected, and not wanted."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a Hollow says what it returns in the place of the part")
