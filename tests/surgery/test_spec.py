"""A spec survives its text; whatever else is typed is answered with a sentence."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vitrefine.errors import UserError
from vitrefine.surgery.spec import (
    LIBRARIES,
    Call,
    Range,
    Spec,
    Value,
    continue_from,
    freeze,
    parse,
    parse_modifications,
    show,
)

wholes = st.integers(-(2**63), 2**63 - 1)
ranges = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)).map(lambda ends: Range(*sorted(ends)))
words = st.sampled_from(["upper", "paper", "true", "None", "nan", "1-2", "3", "1e5", "a/b:c", "+", "\\", '\\"', "a\nb"])
items = st.one_of(
    st.none(),
    st.booleans(),
    wholes,
    st.floats(allow_nan=False, allow_infinity=False),
    words,
    st.text(),
    ranges,
)
values = items | st.lists(items, max_size=4).map(tuple)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", fullmatch=True)
arguments = st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), values, max_size=4)
elsewhere = st.tuples(st.sampled_from(["hf", "hf_hub", "hf-hub"]), st.text(min_size=1)).map(":".join)
base_names = names | names.map("timm:{}".format) | names.map("torchvision:{}".format) | elsewhere
specs = st.builds(
    Spec, st.builds(Call, base_names, arguments), st.lists(st.builds(Call, names, arguments), max_size=3).map(tuple)
)
# Text made of the grammar's own signs gets much further into the parser than random text does.
almost_specs = st.lists(
    st.sampled_from([*"+()[]=,:-. '\"\\", "vit", "cb", "hf", "a", "1", "9" * 30, "1e999", "0.5", "é", "\n"]),
    max_size=25,
).map("".join)


@given(specs)
def test_round_trip(spec: Spec) -> None:
    again = parse(str(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert str(again) == str(spec)
    # Equality is by text; the values themselves must come back too, with their types.
    for before, after in zip((spec.base, *spec.modifications), (again.base, *again.modifications), strict=True):
        assert before.name == after.name
        assert repr(dict(before.args)) == repr(dict(after.args))


@given(specs)
def test_copies_are_equal(spec: Spec) -> None:
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@given(st.text() | almost_specs)
@example("vit(a=" + "[" * 5000)
@example("vit(a=" + "9" * 5000 + ")")
@example("vit(a=0-" + "9" * 5000 + ")")
def test_any_text_is_a_spec_or_a_user_error(text: str) -> None:
    def answer(read: Callable[[str], object]) -> object:
        try:
            return read(text)
        except UserError as error:
            return str(error)

    first = Spec(Call("vit"))
    for read in (parse, parse_modifications, partial(continue_from, first)):
        found = answer(read)
        match found:
            case str():
                assert found.startswith(f"`{text}`: ")
            case Spec():
                assert parse(str(found)) == found
            case _:
                assert found == parse_modifications("+".join(map(str, found)))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("vit_small_patch16_224", None),
        ("vit_base_patch16_clip_224.openai+cb", None),
        ("vit_small_patch16_224+refiner(expansion=3,kernel_size=3,share=1)+cb_s", None),
        ("pvt_small+less_attention(stages=1-2)+dtm", None),
        ("hf:google/vit-base-patch16-224+cb", None),
        ('hf:"./my models/vit"', None),
        ("hf:~/models/vit", None),
        ("hf_hub:owner/name@main", None),
        ("hf-hub:owner/name", "hf_hub:owner/name"),
        ("torchvision:vit_b_16+cb", None),
        ("timm:vit_tiny_patch16_224", "vit_tiny_patch16_224"),
        (" vit ( b = 1 , a = 2 ) + cb ( ) ", "vit(a=2,b=1)+cb"),
        ("vit(a=True,b=NONE,c=1e-05,d=1e+16,e=.5,f=007)", "vit(a=true,b=none,c=1e-5,d=1e16,e=0.5,f=7)"),
        ("vit(a='upper',b='it\\'s',c=\"true\")", 'vit(a=upper,b="it\'s",c="true")'),
        ("vit+cb(layers=[0-3, 7])", "vit+cb(layers=[0-3,7])"),
        ("vit(a=[])", None),
    ],
)
def test_canonical_form(text: str, canonical: str | None) -> None:
    assert str(parse(text)) == (canonical or text)


def test_parts_of_a_spec() -> None:
    spec = parse("hf:google/vit(size=[32,1-2],rate=0.5)+cb(layers=6-11,position=end)+se")
    assert (spec.library, spec.model) == ("hf", "google/vit")
    assert spec.base.args == {"size": (32, Range(1, 2)), "rate": 0.5}
    assert spec.modifications == (Call("cb", {"position": "end", "layers": Range(6, 11)}), Call("se"))
    assert (parse("vit+cb").library, parse("vit+cb").model) == ("timm", "vit")


def test_quoted_values_are_taken_literally() -> None:
    args = parse(r"""vit(a="C:\models",b="say \"a\"",c='1-2',d="\\")""").base.args
    assert args == {"a": r"C:\models", "b": 'say "a"', "c": "1-2", "d": "\\"}


def test_python_values_become_spec_values() -> None:
    args: dict[str, Any] = {"layers": range(6, 12), "list": [1, 2], "odd": range(1, 6, 2), "none": range(0)}
    assert str(Call("cb", args)) == "cb(layers=6-11,list=[1,2],none=[],odd=[1,3,5])"


def test_true_one_and_one_point_nought_differ() -> None:
    assert len({parse(f"vit(a={value})") for value in ("1", "1.0", "true", "[1]", "1-1", '"1"')}) == 6


def test_arguments_are_read_only() -> None:
    with pytest.raises(TypeError):
        parse("vit(a=1)").base.args["a"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "complaint", "character"),
    [
        ("", "begins with a model's name", 1),
        ("+cb", "nothing stands before the +", 1),
        ("vit+", "the name of a modification, such as cb, is missing here", 5),
        ("vit++cb", "the name of a modification, such as cb, is missing here", 5),
        ("vit_small+cb(", "the bracket opened after cb is never closed", 13),
        ("vit_small(a=1+cb", "a comma or a closing ) is expected here, not +", 14),
        ("vit+cb(a=1", "the bracket opened after cb is never closed", 7),
        ("vit+cb(a=[1,2", "the list of a is never closed", 10),
        ("vit+cb(a=[1)", "a comma or a closing ] is expected here, not )", 12),
        ("vit+cb(a='x)", "the quotation that begins here is never closed", 10),
        ("vit+cb)", "this ) closes no bracket", 7),
        ("vit+cb(a=)", "a has no value here", 10),
        ("vit+cb(a=[1,])", "a has no value here", 13),
        ("vit+cb(3)", "the arguments of cb are written name=value", 8),
        ("vit+cb(a=1,a=2)", "a is given twice", 12),
        ("vit+cb(a=1)x", "after cb comes a + or the end, not x", 12),
        ("vit+cb(a=[[1]])", "a list in a spec holds no other list", 11),
        ("vit+cb(a=7x7)", "7x7 is neither a number, a range nor a word", 10),
        ("vit+cb(a=3-1)", "the range 3-1 runs backwards; write 1-3", 10),
        ("vit+cb(a=1e999)", "a number in a spec is finite", 10),
        ("vit+cb(a=9223372036854775808)", "a whole number in a spec has at most 64 bits", 10),
        ("hf:", "the name of the model is missing after hf:", 4),
        ("tim:vit", "there is no library tim; write timm, hf_hub, hf or torchvision", 1),
        ("google/vit", "a Hugging Face id or a folder is written hf:google/vit", 1),
        ("%", "a model's name cannot begin with %", 1),
    ],
)
def test_complaints_point_at_the_place(text: str, complaint: str, character: int) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"`{text}`: ")
    assert complaint in message
    assert message.endswith(f"(character {character})")
    assert "\n" not in message


@pytest.mark.parametrize(
    "make",
    [
        lambda: Call(""),
        lambda: Call("a b"),
        lambda: Call("hf:"),
        lambda: Call("cb", {"not a name": 1}),
        lambda: Call("cb", {"a": float("nan")}),
        lambda: Call("cb", {"a": 2**63}),
        lambda: freeze([[1]]),
        lambda: freeze(object()),
        lambda: Range(-1, 2),
        lambda: Range(2, 1),
        lambda: Range(0, 2**63),
        lambda: Spec(Call("nowhere:vit")),
        lambda: Spec(Call("torchvision:a/b")),
        lambda: Spec(Call("vit"), (Call("hf:cb"),)),
    ],
)
def test_what_could_not_be_written_cannot_be_built(make: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        make()


def test_a_leading_plus_continues_the_first_spec() -> None:
    first = parse("vit(img_size=32)+cb")
    assert str(continue_from(first, "+se+dla(kernel_size=5)")) == "vit(img_size=32)+cb+se+dla(kernel_size=5)"
    assert continue_from(first, " + se") == parse("vit(img_size=32)+cb+se")
    assert continue_from(first, "swin+dtm") == parse("swin+dtm")
    assert parse_modifications("cb+se") == parse_modifications("+cb+se") == (Call("cb"), Call("se"))


def test_every_library_may_be_named() -> None:
    assert all(parse(f"{library}:vit").library == library for library in LIBRARIES)


@given(values)
def test_values_print_without_spaces_outside_quotations(value: Value) -> None:
    text = show(value)
    assert '"' in text or not any(letter.isspace() for letter in text)


def test_parsing_needs_no_heavy_library() -> None:
    code = (
        "import sys; sys.argv = ['vitrefine']; import vitrefine.surgery.registry as r; r.names(); "
        "print([m for m in ('torch', 'timm', 'numpy', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
