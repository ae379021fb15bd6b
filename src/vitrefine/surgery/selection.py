"""Selections of blocks and stages, as specs write them: a word, a number, a range or a list of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn

from vitrefine.errors import UserError
from vitrefine.surgery.spec import Range, Value, freeze, show


class Unfit(Exception):
    """A value is not of the kind an option takes."""


def unfit() -> NoReturn:
    raise Unfit


@dataclass(frozen=True)
class Numbering:
    """What a selection counts, and from where: blocks from 0 as in Python, stages from 1 as in the papers."""

    option: str
    counted: str
    first: int
    words: tuple[str, ...]
    forms: tuple[str, ...]

    @property
    def takes(self) -> str:
        return join([*self.words, *self.forms])


_BLOCKS = Numbering("layers", "block", 0, ("upper", "all"), ("a block", "a range (6-11)", "a list ([0,3,6-8])"))
_STAGES = Numbering("stages", "stage", 1, ("all",), ("a stage", "a range (1-2)", "a list ([1,3])"))

Layers = Annotated[Literal["upper", "all"] | int | Range | Sequence[int | Range], _BLOCKS]
Stages = Annotated[Literal["all"] | int | Range | Sequence[int | Range], _STAGES]


def resolve_layers(layers: Layers, depth: int) -> list[int]:
    """The indexes of the selected blocks, in order; `upper` is the upper half, the middle block of an odd depth too."""
    if layers == "upper":
        return list(range(depth // 2, depth))
    return _resolve(layers, depth, _BLOCKS)


def resolve_stages(stages: Stages, count: int) -> list[int]:
    """The indexes, from 0, of the selected stages, in order; the selection itself counts from 1 as the papers do."""
    return [stage - 1 for stage in _resolve(stages, count, _STAGES)]


def _resolve(selection: object, count: int, numbering: Numbering) -> list[int]:
    first, last = numbering.first, numbering.first + count - 1
    if selection == "all":
        return list(range(first, last + 1))
    try:
        runs = _runs(selection)
    except Unfit:
        raise UserError(f"{numbering.option} takes {numbering.takes}, not {selection!r}") from None
    if runs[0].first < first or runs[-1].last > last:
        raise UserError(
            f"{numbering.option}={show(freeze(selection))} is out of range: "
            f"the model has {count} {numbering.counted}{'s' * (count != 1)}, {first} to {last}"
        )
    return [number for run in runs for number in range(run.first, run.last + 1)]


def selection(numbering: Numbering, value: Value) -> Value:
    if isinstance(value, str) and value in numbering.words:
        return value
    items = tuple(run.first if run.first == run.last else run for run in _runs(value))
    return items if len(items) > 1 else items[0]


def _runs(selection: object) -> list[Range]:
    """The runs of neighbouring numbers that a selection is made of, in order; runs, for a range may be long."""
    items = selection if isinstance(selection, Sequence) and not isinstance(selection, str) else [selection]
    runs: list[Range] = []
    for item in sorted(map(_run, items), key=lambda run: run.first):
        if runs and item.first <= runs[-1].last + 1:
            runs[-1] = Range(runs[-1].first, max(runs[-1].last, item.last))
        else:
            runs.append(item)
    return runs or unfit()


def _run(item: object) -> Range:
    if isinstance(item, Range):
        return item
    return Range(item, item) if type(item) is int and item >= 0 else unfit()


def join(texts: list[str], conjunction: str = "or") -> str:
    *others, last = texts
    return f"{', '.join(others)} {conjunction} {last}" if others else last
