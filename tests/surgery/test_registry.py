"""Options come from signatures, modules load when used, and a wrong option is answered with the right one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrefine.errors import UserError
from vitrefine.surgery import registry, selection
from vitrefine.surgery.registry import MODULES, canonicalise, get, modification, names, validate
from vitrefine.surgery.selection import Layers, Stages, resolve_layers, resolve_stages
from vitrefine.surgery.spec import Range, parse, parse_modifications

MODULE = "a_module_of_modifications"
SOURCE = '''
from __future__ import annotations
from typing import Literal
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Layers, Stages


@modification(summary="add the mean token")
def cb(
    model: object,
    *,
    position: Literal["front", "mid", "end"] = "end",
    layers: Layers = "upper",
    scale: float = 0.5,
    kernel_size: int = 3,
    norm: bool = False,
    name: str = "cb",
    groups: int | None = None,
    stages: Stages = (1, 2),
) -> list[str]:
    """Changes the model.

    Args:
        model: the model
        position: where the mean
            is added
        layers: which blocks

    Returns:
        the changes
    """
    return [position]


@modification(summary="scaled")
def cb_s(model: object) -> list[str]:
    return []
'''


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "MODULES", dict.fromkeys(("cb", "cb_s", "cb_lost"), MODULE))
    monkeypatch.setattr(registry, "_registered", {})
    yield
    sys.modules.pop(MODULE, None)


def options(text: str) -> dict[str, object]:
    (call,) = parse_modifications(text)
    return dict(validate(call))


def test_a_module_is_imported_when_it_is_used() -> None:
    assert names() == ["cb", "cb_s", "cb_lost"]
    with pytest.raises(UserError):
        get("nothing")
    assert MODULE not in sys.modules
    found = get("cb")
    assert MODULE in sys.modules
    assert (found.name, found.summary, found.apply(None, position="mid")) == ("cb", "add the mean token", ["mid"])


def test_options_come_from_the_signature_and_the_docstring() -> None:
    found = get("cb").options
    assert list(found) == ["position", "layers", "scale", "kernel_size", "norm", "name", "groups", "stages"]
    assert found["position"].default == "end"
    assert found["position"].takes == "front, mid or end"
    assert found["position"].help == "where the mean is added"
    assert found["layers"].help == "which blocks"
    assert found["scale"].help == ""
    assert found["groups"].takes == "a whole number or none"
    assert found["stages"].default == Range(1, 2)
    assert dict(get("cb_s").options) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cb", {}),
        ("cb(position=mid)", {"position": "mid"}),
        ("cb(scale=1)", {"scale": 1.0}),
        ("cb(groups=4,norm=true)", {"groups": 4, "norm": True}),
        ("cb(name='a b')", {"name": "a b"}),
        ("cb(layers=[7,0-2,1-3,4,9])", {"layers": (Range(0, 4), 7, 9)}),
        ("cb(layers=[3])", {"layers": 3}),
        ("cb(layers=[0-9223372036854775806])", {"layers": Range(0, 2**63 - 2)}),
        ("cb(position=end,scale=0.5,norm=false,groups=none,layers=upper,stages=[2,1])", {}),
    ],
)
def test_valid_options(text: str, expected: dict[str, object]) -> None:
    found = options(text)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(expected[key]) for key in found]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cb(postion=end)", "`+cb(postion=end)`: cb has no option postion; did you mean position?"),
        ("cb(position=emd)", "`+cb(position=emd)`: position takes front, mid or end, not emd"),
        ("cb(position=3)", "`+cb(position=3)`: position takes front, mid or end, not 3"),
        (
            "cb(zzz=1)",
            "`+cb(zzz=1)`: cb has no option zzz; it has position, layers, scale, kernel_size, norm, name, groups and "
            "stages",
        ),
        ("cb_s(a=1)", "`+cb_s(a=1)`: cb_s takes no options"),
        ("cb(kernel_size=3.0)", "`+cb(kernel_size=3.0)`: kernel_size takes a whole number, not 3.0"),
        ("cb(kernel_size=true)", "`+cb(kernel_size=true)`: kernel_size takes a whole number, not true"),
        ("cb(norm=1)", "`+cb(norm=1)`: norm takes true or false, not 1"),
        ("cb(scale=much)", "`+cb(scale=much)`: scale takes a number, not much"),
        ("cb(scale=1-2)", "`+cb(scale=1-2)`: scale takes a number, not 1-2"),
        ("cb(name=3)", "`+cb(name=3)`: name takes a word or a text in quotes, not 3"),
        ("cb(groups=few)", "`+cb(groups=few)`: groups takes a whole number or none, not few"),
        (
            "cb(layers=lower)",
            "`+cb(layers=lower)`: layers takes upper, all, a block, a range (6-11) or a list ([0,3,6-8]), not lower",
        ),
        (
            "cb(stages=upper)",
            "`+cb(stages=upper)`: stages takes all, a stage, a range (1-2) or a list ([1,3]), not upper",
        ),
        ("cbs", "there is no modification 'cbs'; did you mean cb_s? (all: cb, cb_s, cb_lost)"),
        ("zzz", "there is no modification 'zzz' (all: cb, cb_s, cb_lost)"),
    ],
)
def test_wrong_options_are_answered_with_the_right_ones(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        options(text)
    assert str(caught.value) == complaint


@pytest.mark.parametrize("value", ["-1", "[]", "[upper]", "[1,-1]", "0.5", "true", "none", "[true]", '"6-11"'])
def test_what_is_no_selection(value: str) -> None:
    with pytest.raises(UserError, match="layers takes upper, all, a block"):
        options(f"cb(layers={value})")


def test_canonicalise() -> None:
    spec = canonicalise(parse("vit(b=1)+cb(position=end,scale=2,layers=[2,1])+cb_s()"))
    assert str(spec) == "vit(b=1)+cb(layers=1-2,scale=2.0)+cb_s"
    assert canonicalise(spec) == spec


def test_a_promised_modification_that_is_not_there() -> None:
    with pytest.raises(TypeError, match=f"{MODULE} does not define the modification cb_lost"):
        get("cb_lost")


def test_a_modification_of_the_users_own() -> None:
    @modification(summary="mine")
    def mine(model: object, *, rate: float = 1) -> list[str]:
        return ["mine"]

    assert names()[-1] == "mine"
    assert mine(None) == ["mine"]
    assert options("mine(rate=1)") == {}
    assert get("mine").options["rate"].default == 1.0


def test_a_name_has_one_owner() -> None:
    def cb(model: object) -> list[str]:
        return []

    with pytest.raises(TypeError, match=f"defines the modification cb, which is that of {MODULE}"):
        modification(summary="an impostor")(cb)


def without_default(model: object, *, a: int) -> None: ...
def positional(model: object, a: int = 1) -> None: ...
def without_annotation(model: object, *, a=1) -> None: ...  # type: ignore[no-untyped-def]
def of_a_strange_kind(model: object, *, a: dict[str, int] | None = None) -> None: ...
def contradictory(model: object, *, a: Literal["x"] = "y") -> None: ...  # type: ignore[assignment]


@pytest.mark.parametrize(
    "apply",
    [without_default, positional, without_annotation, of_a_strange_kind, contradictory],
    ids=lambda f: f.__name__,
)
def test_a_signature_that_cannot_be_written_in_a_spec_is_refused(apply: object) -> None:
    with pytest.raises(TypeError, match="option a of"):
        modification(summary="")(apply)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("layers", "depth", "expected"),
    [
        ("upper", 12, [6, 7, 8, 9, 10, 11]),
        ("upper", 5, [2, 3, 4]),
        ("upper", 1, [0]),
        ("all", 3, [0, 1, 2]),
        (0, 3, [0]),
        (Range(1, 2), 3, [1, 2]),
        ((Range(6, 8), 0, 7), 12, [0, 6, 7, 8]),
        ([3, 1], 4, [1, 3]),
        (range(2, 4), 4, [2, 3]),
    ],
)
def test_resolve_layers(layers: Layers, depth: int, expected: list[int]) -> None:
    assert resolve_layers(layers, depth) == expected


def test_stages_count_from_one() -> None:
    assert resolve_stages("all", 4) == [0, 1, 2, 3]
    assert resolve_stages(Range(1, 2), 4) == [0, 1]
    assert resolve_stages([4, 1], 4) == [0, 3]


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        (12, "layers=12 is out of range: the model has 12 blocks, 0 to 11"),
        (Range(6, 2**62), f"layers=6-{2**62} is out of range: the model has 12 blocks, 0 to 11"),
        ([0, 14], "layers=[0,14] is out of range: the model has 12 blocks, 0 to 11"),
        (-1, "layers takes upper, all, a block, a range (6-11) or a list ([0,3,6-8]), not -1"),
        ("6-11", "layers takes upper, all, a block, a range (6-11) or a list ([0,3,6-8]), not '6-11'"),
    ],
)
def test_layers_out_of_range(layers: Layers, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_layers(layers, 12)
    assert str(caught.value) == complaint


@pytest.mark.parametrize("stages", [0, 5, Range(0, 2), Range(3, 5)])
def test_stages_out_of_range(stages: Stages) -> None:
    with pytest.raises(UserError, match="is out of range: the model has 4 stages, 1 to 4"):
        resolve_stages(stages, 4)


@given(st.lists(st.integers(0, 30) | st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1))
def test_a_selection_keeps_its_meaning_when_it_is_put_in_order(parts: list[int | tuple[int, int]]) -> None:
    selected = [Range(*sorted(part)) if isinstance(part, tuple) else part for part in parts]
    expected: set[int] = set()
    for part in selected:
        expected |= set(range(part.first, part.last + 1)) if isinstance(part, Range) else {part}
    assert resolve_layers(selected, 31) == sorted(expected)
    numbering = selection._BLOCKS
    tidied = selection.selection(numbering, tuple(selected))
    assert resolve_layers(tidied, 31) == sorted(expected)  # type: ignore[arg-type]
    assert selection.selection(numbering, tuple(sorted(expected))) == tidied


@pytest.mark.parametrize("name", MODULES)
def test_every_listed_modification_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = get(name)
    assert found.name == name
    assert found.summary
    assert all(option.help for option in found.options.values())
