"""The spec: a model and what was done to it, written the way papers write `ViT-S + CB`.

    spec    = base ("+" modification)*         vit_small_patch16_224(img_size=32)+refiner(expansion=3)+cb
    base    = [library ":"] name [arguments]   library: timm (the default), hf_hub, hf or torchvision
    arguments = "(" name "=" value, … ")"
    value   = 3 | 0.5 | true | none | upper | "any text" | 6-11 | [0,3,6-8]

    hf_hub:owner/name                a timm model on the Hugging Face Hub
    hf:google/vit-base-patch16-224   a transformers model, or a folder that holds one: hf:"./my models/vit"
    torchvision:vit_b_16

Spaces between the parts mean nothing. The canonical form, `str(spec)`, has none; its arguments are in alphabetical
order, its numbers as Python prints them, and `timm:` is left unsaid. Two calls are equal when they print the same.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from vitrefine.errors import UserError

LIBRARIES = ("timm", "hf_hub", "hf", "torchvision")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_PATH = re.compile(r"[A-Za-z0-9_.\-/@~]+")
_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/:@~]*")
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
# A + ends a bare value, so that an unclosed bracket is found where it is; 1e+5 is the exception.
_BARE = re.compile(r"""(?:[^\s,()\[\]="'+]|(?<=[0-9.][eE])\+)+""")
# A backslash stands for itself, as in a Windows path, unless a quotation mark or a second one follows.
_ESCAPED = re.compile(r"""\\(["'\\])""")
_QUOTED = re.compile(r"""(["'])((?:\\["'\\]|(?!\1).)*+)\1""", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "none": None}

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The whole numbers from first to last, both included: `6-11`."""

    first: int
    last: int

    def __post_init__(self) -> None:
        for end in (self.first, self.last):
            if type(end) is not int or not 0 <= end < 2**63:
                raise UserError(f"a range runs between whole numbers of at most 64 bits, not to or from {end}")
        if self.last < self.first:
            raise UserError(f"the range {self} runs backwards; write {self.last}-{self.first}")

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


Item = bool | int | float | str | Range | None
Value = Item | tuple[Item, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """A name and its arguments; Python's lists and ranges are taken for the tuples and `Range`s of a spec."""

    name: str
    args: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        library, colon, model = self.name.partition(":")
        if not _NAME.fullmatch(library) or (colon and not model):
            raise UserError(f"{self.name!r} is no name; names are made of letters, digits, _, . and -")
        for key in self.args:
            if not _ARGUMENT.fullmatch(key):
                raise UserError(f"{key!r} is no argument's name; those are made of letters, digits and _")
        args = {key: freeze(self.args[key]) for key in sorted(self.args)}
        object.__setattr__(self, "args", MappingProxyType(args))

    def __str__(self) -> str:
        library, colon, model = self.name.partition(":")
        name = f"{library}:{model if _PATH.fullmatch(model) else _quote(model)}" if colon else self.name
        args = ",".join(f"{key}={show(value)}" for key, value in self.args.items())
        return f"{name}({args})" if args else name

    # Python holds 1, 1.0 and True to be equal; as arguments they are three different things.
    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, Call) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    # A read-only view can be neither pickled nor deep-copied; models that carry their spec must be.
    def __reduce__(self) -> tuple[type["Call"], tuple[str, dict[str, Value]]]:
        return Call, (self.name, dict(self.args))


@dataclass(frozen=True)
class Spec:
    """A base model and its modifications, in the order in which they are applied."""

    base: Call
    modifications: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", Call(_base_name(self.base.name), self.base.args))
        object.__setattr__(self, "modifications", tuple(self.modifications))
        for call in self.modifications:
            if ":" in call.name:
                raise UserError(f"{call.name} names a library, which only the base of a spec may do")

    def __str__(self) -> str:
        return "+".join(map(str, (self.base, *self.modifications)))

    @property
    def library(self) -> str:
        """Where the base comes from: one of `LIBRARIES`."""
        library, colon, _ = self.base.name.partition(":")
        return library if colon else "timm"

    @property
    def model(self) -> str:
        """The base's name within its library."""
        return self.base.name.partition(":")[2] or self.base.name


def parse(text: str) -> Spec:
    """The spec that a text writes down."""
    return _Reader(text).spec()


def parse_modifications(text: str) -> tuple[Call, ...]:
    """The modifications of `cb+refiner(expansion=3)`, a spec without its base; a leading + may be there."""
    return _Reader(text).modifications()


def continue_from(first: Spec, text: str) -> Spec:
    """What `+cb` means after `first` on a command line: first, with cb; a text with a base stands on its own."""
    if not text.lstrip().startswith("+"):
        return parse(text)
    return Spec(first.base, first.modifications + parse_modifications(text))


def freeze(value: Any) -> Value:
    """A Python value as a spec holds it, or a `UserError` if a spec cannot hold it."""
    if isinstance(value, range):
        value = Range(value[0], value[-1]) if value.step == 1 and value else tuple(value)
    if isinstance(value, (list, tuple)):
        items = tuple(freeze(item) for item in value)
        if any(isinstance(item, tuple) for item in items):
            raise UserError("a list in a spec holds no other list")
        return items  # type: ignore[return-value]
    if value is None or isinstance(value, (bool, Range)):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise UserError("a whole number in a spec has at most 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"a number in a spec is finite, not {value}")
        return float(value)
    if isinstance(value, str):
        return str(value)
    raise UserError(f"a spec holds numbers, words, ranges and lists, not a {type(value).__name__}")


def show(value: Value) -> str:
    """A value in its canonical form."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case float():
            return re.sub(r"e\+?(-?)0*", r"e\1", repr(value))
        case str():
            return value if _WORD.fullmatch(value) and value.lower() not in _CONSTANTS else _quote(value)
        case tuple():
            return f"[{','.join(map(show, value))}]"
        case _:
            return str(value)


def _quote(text: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _base_name(name: str) -> str:
    library, colon, model = name.partition(":")
    if not colon:
        library, model = "timm", name
    if library == "hf-hub":  # timm writes it both ways
        library = "hf_hub"
    if library not in LIBRARIES:
        raise UserError(f"there is no library {library}; write {', '.join(LIBRARIES[:-1])} or {LIBRARIES[-1]}")
    if library in ("timm", "torchvision") and not _NAME.fullmatch(model):
        raise UserError(f"{library} has no model named {model}; a Hugging Face id or a folder is written hf:{model}")
    return model if library == "timm" else f"{library}:{model}"


def _bare_value(text: str) -> Value:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _WORD.fullmatch(text):
        return text
    if ends := _RANGE.fullmatch(text):
        return Range(_whole(ends[1]), _whole(ends[2]))
    if _WHOLE.fullmatch(text):
        return freeze(_whole(text))
    if _DECIMAL.fullmatch(text):
        return freeze(float(text))
    raise UserError(f"{text} is neither a number, a range nor a word; text like this goes in quotes")


def _whole(digits: str) -> int:
    # Python itself refuses to read very long numbers; twenty characters hold every 64-bit one.
    return int(digits if len(digits) <= 20 else "9" * 20)


class _Reader:
    """Reads a text from left to right; every complaint says at which character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, sentence: str, at: int | None = None) -> NoReturn:
        raise UserError(f"`{self.text}`: {sentence} (character {(self.at if at is None else at) + 1})")

    def peek(self) -> str:
        """The next character that is no space, or nothing at the end."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found[0] if found else ""

    def build(self, start: int, make: Callable[..., T], *parts: Any) -> T:
        try:
            return make(*parts)
        except UserError as error:
            self.fail(str(error), start)

    def spec(self) -> Spec:
        if not self.peek():
            self.fail("a spec begins with a model's name, such as vit_small_patch16_224")
        if self.peek() == "+":
            self.fail("nothing stands before the +; begin with a model's name, such as vit_small_patch16_224")
        start = self.at
        name = self.build(start, _base_name, self.base_name())
        base = Call(name, self.arguments(name))
        self.end_of_call(name)
        return Spec(base, self.modifications() if self.peek() else ())

    def modifications(self) -> tuple[Call, ...]:
        calls = []
        if self.peek() == "+":
            self.at += 1
        while True:
            self.peek()
            name = self.take(_NAME)
            if not name:
                self.fail("the name of a modification, such as cb, is missing here")
            calls.append(Call(name, self.arguments(name)))
            self.end_of_call(name)
            if not self.peek():
                return tuple(calls)
            self.at += 1

    def base_name(self) -> str:
        name = self.take(_PATH)
        if not name:
            self.fail(f"a model's name cannot begin with {self.peek()}")
        if self.peek() != ":":
            return name
        self.at += 1
        model = self.quoted() if self.peek() in ("'", '"') else self.take(_PATH)
        if not model:
            self.fail(f"the name of the model is missing after {name}:")
        return f"{name}:{model}"

    def end_of_call(self, name: str) -> None:
        following = self.peek()
        if following in (")", "]"):
            self.fail(f"this {following} closes no bracket")
        if following not in ("", "+"):
            self.fail(f"after {name} comes a + or the end, not {following}")

    def bracketed(self, closing: str, unclosed: str, read_one: Callable[[], None]) -> None:
        """Reads what stands between two brackets, separated by commas."""
        opened = self.at
        self.at += 1
        following = self.peek()
        if following == closing:
            self.at += 1
        while following != closing:
            if not self.peek():
                self.fail(unclosed, opened)
            read_one()
            following = self.peek()
            if not following:
                self.fail(unclosed, opened)
            if following not in (",", closing):
                self.fail(f"a comma or a closing {closing} is expected here, not {following}")
            self.at += 1

    def arguments(self, owner: str) -> dict[str, Value]:
        args: dict[str, Value] = {}

        def read_one() -> None:
            start = self.at
            key = self.take(_ARGUMENT)
            if not key or self.peek() != "=":
                self.fail(f"the arguments of {owner} are written name=value", start)
            if key in args:
                self.fail(f"{key} is given twice", start)
            self.at += 1
            args[key] = self.value(key)

        if self.peek() == "(":
            self.bracketed(")", f"the bracket opened after {owner} is never closed", read_one)
        return args

    def value(self, key: str) -> Value:
        if self.peek() != "[":
            return self.item(key)
        items: list[Item] = []
        self.bracketed("]", f"the list of {key} is never closed", lambda: items.append(self.item(key)))
        return tuple(items)

    def item(self, key: str) -> Item:
        if self.peek() in ("'", '"'):
            return self.quoted()
        if self.peek() == "[":
            self.fail("a list in a spec holds no other list")
        start = self.at
        bare = self.take(_BARE)
        if not bare:
            self.fail(f"{key} has no value here")
        return self.build(start, _bare_value, bare)  # type: ignore[return-value]

    def quoted(self) -> str:
        found = _QUOTED.match(self.text, self.at)
        if not found:
            self.fail("the quotation that begins here is never closed")
        self.at = found.end()
        return _ESCAPED.sub(r"\1", found[2])
