"""What is lost under changes, with intervals by hand."""

import numpy as np
import pytest
import torch
from scipy import stats

from vitrefine.evaluate.attacks import FGSM, PGD
from vitrefine.evaluate.change import Change
from vitrefine.evaluate.noise import Blur, GaussianNoise, ShotNoise
from vitrefine.evaluate.occlusion import Occlusion
from vitrefine.evaluate.robustness import Trial, measure_robustness, usual_trials


class Darker(Change):
    """Half of the images become black."""

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
    assert {trial.name: trial.changes for trial in trials} == {
        "occlusion": (Occlusion(0.5, "black"),),
        "occlusion-mean": (Occlusion(0.5, "mean"),),
        "fgsm-1": (FGSM(1),),
        "fgsm-8": (FGSM(8),),
        "pgd-1": (PGD(1, steps=10, seed=3),),
        "shot-noise": (ShotNoise(60, 3, 0), ShotNoise(60, 3, 1)),
        "noise-5": (GaussianNoise(5, 3, 0), GaussianNoise(5, 3, 1)),
        "noise-10": (GaussianNoise(10, 3, 0), GaussianNoise(10, 3, 1)),
        "blur-1": (Blur(1),),
        "blur-2": (Blur(2),),
    }
    keys = [change.key for trial in trials for change in trial.changes]
    assert len(set(keys)) == len(keys)
    first, again = (measure_robustness(tester, tester.predict(), trials) for _ in range(2))
    assert first == again
    assert [found.name for found in first] == [trial.name for trial in trials]
    assert {found.accuracy.count for found in first} == {8, 2}
