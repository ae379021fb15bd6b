"""Intervals against scipy's, against hand-computed values, and against what they promise."""

import numpy as np
import pytest
from scipy import stats

from vitrefine.statistics import (
    accuracy,
    difference,
    difference_over_images,
    difference_over_seeds,
    half_width,
    over_images,
    over_seeds,
)

FIRST = {0: 91.2, 1: 92.9, 2: 90.4, 3: 91.1}
SECOND = {0: 91.9, 1: 93.0, 2: 91.6, 3: 91.8}


def bits(right: int, wrong: int) -> np.ndarray:
    return np.array([True] * right + [False] * wrong)


def test_mean_over_seeds_is_students() -> None:
    values = list(FIRST.values())
    found = over_seeds(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high), abs=1e-12)
    assert (found.over, found.count) == ("seeds", 4)


def test_by_hand() -> None:
    """Differences 0, 1 and 2: mean 1, s = 1. For two degrees of freedom t is a·√(2/(1 − a²)), here with a = 0.95."""
    found = over_seeds([0.0, 1.0, 2.0])
    assert found.value == 1.0
    assert found.high == pytest.approx(1 + 0.95 * (2 / (1 - 0.95**2)) ** 0.5 / 3**0.5, abs=1e-8)
    assert found.sign == 0


def test_spread_and_what_more_seeds_leave_of_an_interval() -> None:
    values = list(FIRST.values())
    assert over_seeds(values).spread == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert half_width(0.5, 10) == pytest.approx(stats.t.ppf(0.975, 9) * 0.5 / 10**0.5, abs=1e-12)
    assert over_seeds([1.0, 1.0]).spread is None
    assert over_images(bits(7, 3)).spread is None


def test_difference_over_seeds_is_the_paired_t_test() -> None:
    found = difference_over_seeds(FIRST, SECOND)
    expected = stats.ttest_rel(list(SECOND.values()), list(FIRST.values())).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-10)
    assert found.value == pytest.approx(0.675)
    unpaired = stats.ttest_ind(list(SECOND.values()), list(FIRST.values())).confidence_interval(0.95)
    assert found.high - found.low < unpaired.high - unpaired.low


def test_only_common_seeds_are_paired() -> None:
    found = difference_over_seeds({**FIRST, 7: 0.0}, {**SECOND, 8: 100.0})
    assert found == difference_over_seeds(FIRST, SECOND)
    assert difference_over_seeds({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(("right", "count"), [(0, 12), (12, 12), (1, 30), (337, 360), (180, 360)])
def test_share_is_wilsons(right: int, count: int) -> None:
    found = over_images(bits(right, count - right))
    expected = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert (found.low, found.high) == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-9)
    assert found.value == pytest.approx(100 * right / count)


def test_difference_over_images_by_hand() -> None:
    """Of 98 images 8 are gained and 3 lost: b' = 9/100, c' = 4/100, and 0.05 ± 1.959964 · √(0.1275/100)."""
    first = np.array([True] * 3 + [False] * 8 + [True] * 60 + [False] * 27)
    second = np.array([False] * 3 + [True] * 8 + [True] * 60 + [False] * 27)
    found = difference_over_images(first, second)
    half = 1.959963984540054 * (0.1275 / 100) ** 0.5
    assert (found.low, found.high) == pytest.approx((5 - 100 * half, 5 + 100 * half), abs=1e-9)
    assert found.value == pytest.approx(100 * 5 / 98)
    back = difference_over_images(second, first)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))


def test_difference_over_images_covers() -> None:
    """95 % intervals hold the truth about 95 times in 100, also where the models rarely disagree."""
    draw = np.random.default_rng(0)
    truth, held = 100 * (0.03 - 0.02), 0
    for _ in range(2000):
        fate = draw.choice(4, size=360, p=[0.03, 0.02, 0.9, 0.05])  # gained, lost, both right, both wrong
        found = difference_over_images((fate == 1) | (fate == 2), (fate == 0) | (fate == 2))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert 0.94 <= held / 2000 <= 0.98


def test_models_that_agree_everywhere_are_not_proven_equal() -> None:
    found = difference_over_images(bits(5, 5), bits(5, 5))
    assert found.value == 0
    assert found.low is not None
    assert found.low < 0


def test_values_that_do_not_vary_have_no_interval() -> None:
    same = over_seeds([0.3, 0.3, 0.1 + 0.2])
    assert (same.low, same.high, same.sign) == (None, None, None)
    assert over_seeds([1.0]).low is None


def test_one_seed_is_judged_by_images_and_several_by_seeds() -> None:
    one, other = {0: bits(90, 10)}, {0: bits(95, 5)}
    assert accuracy({}) is None
    assert accuracy(one) == over_images(one[0])
    assert difference(one, other) == difference_over_images(one[0], other[0])
    several = {**one, 1: bits(80, 20)}
    found = accuracy(several)
    assert found is not None
    assert (found.over, found.value) == ("seeds", 85.0)
    # One seed in common is one pair, however many there are besides.
    assert difference(several, other) == difference_over_images(one[0], other[0])
    assert difference(several, {2: bits(1, 99)}) is None


def test_images_that_were_not_the_same_are_not_paired() -> None:
    assert difference({0: bits(90, 10)}, {0: bits(90, 9)}) is None
