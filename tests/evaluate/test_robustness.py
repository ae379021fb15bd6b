"""What is lost under changes, with intervals by hand."""

import numpy as np
import pytest
import torch
from scipy import stats

from vitrefine.evaluate.noise import GaussianNoise
from vitrefine.evaluate.robustness import Trial, measure_robustness, usual_trials


class Darker:
    """Half of the images become black."""

    key = "darker"

    def __call__(self, subject, shown):
        return torch.where((shown.index % 2 == 0)[:, None, None, None], 0.0, shown.pixels)


def test_a_change_without_chance_is_paired_image_by_image(examiner):
    tester = examiner()
    clean, changed = tester.predict(), tester.predict(Darker())
    (found,) = measure_robustness(tester, clean, [Trial("darker", "some are black", (Darker(),))])
    n, b, c = 60, int((changed.right & ~clean.right).sum()), int((clean.right & ~changed.right).sum())
    assert (found.accuracy.over, found.accuracy.count) == ("images", 60)
    assert found.difference.value == pytest.approx(100 * (b - c) / n)
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = stats.norm.ppf(0.975) * np.sqrt((p + q - (p - q) ** 2) / (n + 2))
    assert found.difference.low == pytest.approx(100 * (p - q - half))


def test_repeats(examiner):
    """Mean and Student's interval over draws."""
    tester = examiner()
    clean = tester.predict()
    draws = tuple(GaussianNoise(60, 0, draw) for draw in range(5))
    (found,) = measure_robustness(tester, clean, [Trial("noise", "noise", draws)])
    shares = [100 * tester.predict(draw).right.mean() for draw in draws]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(shares), scale=stats.sem(shares))
    assert (found.accuracy.over, found.accuracy.count) == ("seeds", 5)
    assert found.accuracy.value == pytest.approx(np.mean(shares))
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((low, high))
    assert found.difference.value == pytest.approx(np.mean(shares) - 100 * clean.right.mean())


def test_the_usual_trials(examiner):
    tester = examiner(limit=8)
    trials = usual_trials(seed=3, repeats=2)
    keys = [change.key for trial in trials for change in trial.changes]
    assert len(set(keys)) == len(keys)
    first, again = (measure_robustness(tester, tester.predict(), trials) for _ in range(2))
    assert first == again
    assert [found.name for found in first] == [trial.name for trial in trials]
    assert {found.accuracy.count for found in first} == {8, 2}
