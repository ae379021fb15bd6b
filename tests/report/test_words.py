"""Figures as text."""

import pytest

from vitrefine.report import words
from vitrefine.statistics import Estimate


def test_numbers_have_true_minus_signs_and_zero_none() -> None:
    assert words.number(-0.42, 1, signed=True) == "−0.4"
    assert words.number(0.42, 1, signed=True) == "+0.4"
    assert words.number(-0.04, 1, signed=True) == "0.0"
    assert words.number(93.25, 2) == "93.25"
    assert words.number(-17748.2, 0, signed=True) == "−17,748"


def test_an_interval_that_excludes_zero_does_not_read_as_if_it_touched_it() -> None:
    narrow = Estimate(0.4, 0.003, 0.8, "seeds", 3)
    digits = words.enough(narrow, 1)
    assert words.interval(narrow, digits, signed=True) == "+0.003 … +0.800"
    assert words.enough(Estimate(0.4, -0.003, 0.8, "seeds", 3), 1) == 1


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "±0 %"), (1.0004, "±0 %"), (1.123, "+12 %"), (0.945, "−5.5 %"), (3.67, "+267 %")]
)
def test_changes(ratio: float, text: str) -> None:
    assert words.percent(ratio).replace("\u00a0", " ") == text


def test_units() -> None:
    assert [words.count(n) for n in (5_390_000, 360e6, 19.8e9, 62_600, 812)] == [
        "5.39 M",
        "360 M",
        "19.8 G",
        "62.6 k",
        "812",
    ]
    assert [words.duration(s) for s in (12, 245, 4800)] == ["12 s", "4 min 5 s", "1 h 20 min"]
    assert [words.mebibytes(m) for m in (512.4, 20480)] == ["512 MiB", "20.0 GiB"]
    assert [words.rate(r) for r in (4.26, 51600)] == ["4.3", "51,600"]


def test_lists() -> None:
    assert words.listing(["a"]) == "a"
    assert words.listing(["a", "b", "c"]) == "a, b and c"
    assert words.plural(1, "seed") == "1 seed"
