"""Mistakes in a ledger are told with file and line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vitrefine.claims.ledger import read_ledgers
from vitrefine.errors import UserError

HEAD = "title: A\npaper: B\nusual: {data: cifar100, recipe: cifar, seeds: 3}\nclaims:\n"
CLAIM = '  one:\n    where: "Table 1: a"\n    claim: It helps.\n'
TEST = "    test: {first: vit_tiny_patch16_224, second: vit_tiny_patch16_224+cb, expect: higher%s}\n"
Docs = Callable[..., Path]


def test_what_is_read(make_docs: Docs) -> None:
    (ledger,) = read_ledgers(make_docs())
    assert (ledger.name, ledger.title) == ("paper", "A paper")
    assert list(ledger.claims) == ["table-1-cb", "table-1-se", "table-2-cb", "figure-1"]
    claim = ledger.claims["table-1-cb"]
    assert claim.place == ("Table 1", "CB")
    assert claim.printed == {"top-1 %": {"ViT": 72.2, "+CB": 73.4}}
    assert claim.test is not None
    assert (claim.test.data, claim.test.recipe, claim.test.seeds, claim.test.metric) == (
        "cifar100",
        "cifar",
        3,
        "accuracy",
    )


def test_a_test_may_differ_from_what_is_usual(make_docs: Docs) -> None:
    (ledger,) = read_ledgers(make_docs(HEAD + CLAIM + TEST % ", seeds: 5, recipe: other"))
    test = ledger.claims["one"].test
    assert test is not None
    assert (test.seeds, test.recipe, test.data) == (5, "other", "cifar100")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        (HEAD + CLAIM + "    not_run: a\n    wher: b\n", 9, "there is no setting wher; did you mean where?"),
        (HEAD + CLAIM, 6, "nothing says how it is tested; give one of test, not_run and same_as"),
        (HEAD + CLAIM + "    not_run: a\n    same_as: b\n", 8, "not_run and same_as are both said; give one of"),
        (HEAD + "  one:\n    claim: a\n    not_run: b\n", 5, "where is missing; add it"),
        (HEAD + CLAIM.replace(": a", "") + "    not_run: b\n", 6, "where names a table or figure and then what of it"),
        (
            HEAD + CLAIM + TEST % ", metric: beauty",
            8,
            "test.metric: there is no metric 'beauty'; choose one of accuracy",
        ),
        (HEAD + CLAIM + TEST % ", seeds: 1", 8, "test.seeds must be at least 2, not 1"),
        (HEAD + CLAIM + TEST.replace("+cb", "+cbb") % "", 8, "test.second: "),
        (HEAD + CLAIM + TEST.replace("higher", "not_lower") % "", 8, "not_lower needs to know how large a loss"),
        (HEAD + CLAIM + TEST.replace("higher", "better") % "", 8, "test.expect must be higher, lower or not_lower"),
        (HEAD + CLAIM + "    same_as: two\n", 8, "there is no claim two in this ledger"),
        (HEAD + CLAIM + "    not_run: a\n" + CLAIM, 9, "claims.one is said twice, first in"),
        (HEAD + CLAIM + "    not_run: [\n", 9, "this is no YAML"),
        (HEAD + "  one: text\n", 5, "one must be a claim"),
        (HEAD, 4, "claims must be names with what is said of each"),
        (HEAD.replace("seeds", "seed"), 3, "usual has data, recipe, seeds, but no seed"),
        ("titel: A\n" + HEAD, 1, "there is no titel in a ledger; it has title, paper, usual, claims"),
        (HEAD.replace("title: A", "title: 3"), 1, "a ledger needs a title"),
    ],
)
def test_mistakes(make_docs: Docs, text: str, line: int, sentence: str) -> None:
    docs = make_docs(text)
    with pytest.raises(UserError) as error:
        read_ledgers(docs)
    where, _, said = str(error.value).partition(": ")
    assert where == f"{docs / 'claims' / 'paper.yaml'}, line {line}"
    assert said.startswith(sentence)
    assert "\n" not in str(error.value)


def test_a_repetition_of_a_repetition(make_docs: Docs) -> None:
    twice = '  {}:\n    where: "Table 1: a"\n    claim: c\n    same_as: {}\n'
    docs = make_docs(HEAD + CLAIM + "    not_run: a\n" + twice.format("two", "one") + twice.format("three", "two"))
    with pytest.raises(UserError, match="line 16: two repeats another claim itself"):
        read_ledgers(docs)


def test_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no ledger"):
        read_ledgers(tmp_path)
