"""The modifications a spec may name, and what options each takes.

A modification is one function in a file of its own, and one line in `MODULES`:

    @modification(summary="add the mean token to every token at the end of the MLP (Context Broadcasting)")
    def cb(
        model: nn.Module,
        *,
        position: Literal["front", "mid", "end"] = "end",
        layers: Layers = "upper",
    ) -> list[Change]:
        \"\"\"Changes the model in place.

        Args:
            position: where in the block the mean is added
            layers: the blocks that are changed
        \"\"\"

The function's name is the modification's, its keyword-only parameters are the options of the spec. Each has a default,
so that a bare `+cb` means something, and an annotation made of bool, int, float, str, None, Literal, `Layers`, `Stages`
or a union of these; the line of the docstring that explains it becomes its help. The function changes the model it is
given, returns the list of its changes, and raises `UserError` where it cannot apply; `resolve_layers` and
`resolve_stages` turn the two selections into indexes. Annotations are evaluated: import their names, also for types.

Modules are imported when a modification of theirs is first used: naming one costs nothing, and needs no torch.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitrefine.errors import UserError
from vitrefine.surgery.selection import Numbering, Unfit, join, selection, unfit
from vitrefine.surgery.spec import Call, Spec, Value, freeze, show

MODULES = {
    "cb": "vitrefine.surgery.broadcast",
    "cb_s": "vitrefine.surgery.broadcast",
    "cb_gate": "vitrefine.surgery.broadcast",
    "cb_hybrid": "vitrefine.surgery.broadcast",
    "uniform_head": "vitrefine.surgery.uniform_head",
    "se": "vitrefine.surgery.squeeze_excitation",
    "refiner": "vitrefine.surgery.refine",
    "dla": "vitrefine.surgery.refine",
    "expansion": "vitrefine.surgery.refine",
    "talking_heads": "vitrefine.surgery.refine",
    "dtm": "vitrefine.surgery.deformable_merge",
    "less_attention": "vitrefine.surgery.less_attention",
    "extra_block": "vitrefine.surgery.extra_block",
}

_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word or a text in quotes",
    NoneType: "none",
}

_registered: dict[str, "Modification"] = {}

Apply = TypeVar("Apply", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """One kind of value: what it is called, and a function that returns the value in its form, or raises `Unfit`."""

    called: str
    fit: Callable[[Value], Value]


@dataclass(frozen=True)
class Option:
    """An option of a modification: its default, the kinds of value it takes, and what it is for."""

    default: Value
    kinds: tuple[Kind, ...]
    help: str

    @property
    def takes(self) -> str:
        """The values it takes, in words: `front, mid or end`."""
        return join([kind.called for kind in self.kinds])


@dataclass(frozen=True)
class Modification:
    """A modification by name; `apply(model, **options)` changes the model and returns the list of changes."""

    name: str
    summary: str
    options: Mapping[str, Option]
    apply: Callable[..., Any]


def modification(*, summary: str) -> Callable[[Apply], Apply]:
    """Registers the decorated function as the modification of its name, and leaves it as it is."""

    def register(apply: Apply) -> Apply:
        name, module = apply.__name__, apply.__module__
        owner = MODULES.get(name) or (_registered[name].apply.__module__ if name in _registered else module)
        if owner != module:
            raise TypeError(f"{module} defines the modification {name}, which is that of {owner}")
        _registered[name] = Modification(name, summary, MappingProxyType(_options(apply)), apply)
        return apply

    return register


def names() -> list[str]:
    """The names of all modifications, those a user's own code has registered included; imports nothing."""
    return list(MODULES | _registered)


def get(name: str) -> Modification:
    """The modification of a name; imports its module."""
    if name not in _registered:
        if name not in MODULES:
            near = difflib.get_close_matches(name, names(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"there is no modification {name!r}{hint} (all: {', '.join(names())})")
        importlib.import_module(MODULES[name])
        if name not in _registered:
            raise TypeError(f"{MODULES[name]} does not define the modification {name} that the registry promises")
    return _registered[name]


def validate(call: Call) -> dict[str, Value]:
    """The options of a call as its modification takes them, without those that only repeat a default."""
    found = get(call.name)
    options: dict[str, Value] = {}
    for key, value in call.args.items():
        option = found.options.get(key)
        if option is None:
            raise UserError(f"`+{call}`: {_no_such_option(found, key)}")
        try:
            fitted = _fit(option.kinds, value)
        except Unfit:
            raise UserError(f"`+{call}`: {key} takes {option.takes}, not {show(value)}") from None
        if show(fitted) != show(option.default):
            options[key] = fitted
    return options


def canonicalise(spec: Spec) -> Spec:
    """The spec with every modification checked, its defaults left out and its selections in order."""
    return Spec(spec.base, tuple(Call(call.name, validate(call)) for call in spec.modifications))


def _no_such_option(found: Modification, key: str) -> str:
    if not found.options:
        return f"{found.name} takes no options"
    near = difflib.get_close_matches(key, found.options, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"it has {join(list(found.options), 'and')}"
    return f"{found.name} has no option {key}; {remedy}"


def _options(apply: Callable[..., Any]) -> dict[str, Option]:
    annotations = get_type_hints(apply, include_extras=True)
    _, *parameters = inspect.signature(apply).parameters.values()
    options = {}
    for parameter in parameters:
        name, whose = parameter.name, f"the option {parameter.name} of {apply.__name__}"
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
            raise TypeError(f"{whose} must be keyword-only and have a default")
        kinds = tuple(_kinds(annotations.get(name), whose))
        try:
            default = _fit(kinds, freeze(parameter.default))
        except Unfit:
            raise TypeError(f"the default of {whose} contradicts its annotation") from None
        options[name] = Option(default, kinds, _help(apply, name))
    return options


def _help(apply: Callable[..., Any], name: str) -> str:
    arguments = (inspect.getdoc(apply) or "").partition("Args:\n")[2]
    entry = re.search(rf"^ {{4}}{name}:(.*(?:\n {{5,}}.*)*)", arguments, re.MULTILINE)
    return " ".join(entry[1].split()) if entry else ""


def _kinds(annotation: Any, whose: str) -> list[Kind]:
    """The kinds of value that an annotation admits."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return [kind for part in parts for kind in _kinds(part, whose)]
    if origin is Literal:
        return [Kind(show(choice), partial(_same, choice)) for choice in parts]
    if origin is Annotated and isinstance(parts[1], Numbering):
        return [Kind(parts[1].takes, partial(selection, parts[1]))]
    if annotation not in _PLAIN:
        raise TypeError(f"{whose} is annotated {annotation}; the head of {__name__} says what it may be")
    return [Kind(_PLAIN[annotation], partial(_of_type, annotation))]


def _fit(kinds: tuple[Kind, ...], value: Value) -> Value:
    for kind in kinds:
        try:
            return kind.fit(value)
        except Unfit:
            continue
    raise Unfit


def _same(choice: Value, value: Value) -> Value:
    return value if show(value) == show(choice) else unfit()


def _of_type(wanted: type, value: Value) -> Value:
    if wanted is float and type(value) is int:
        return float(value)
    return value if type(value) is wanted else unfit()
