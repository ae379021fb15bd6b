"""The sweep over crop ratios: chosen on one half, tested on the other."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitrefine.errors import UserError
from vitrefine.evaluate.predictions import Predictions
from vitrefine.evaluate.rfc import _half, calibrate
from vitrefine.statistics import difference_over_images

from .conftest import small_set


class SeesBorder(nn.Module):
    """Right about class 0 if the corner is black, that is, if there is padding; always class 1 otherwise."""

    num_classes = 10

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("black", -torch.tensor(mean) / torch.tensor(std))
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        padded = (images[:, :, 0, 0] - self.black).abs().amax(1) < 1e-5
        return nn.functional.one_hot((~padded).long(), 10).float()


def one_class():
    data = small_set(images=80)
    data._arrays.test.labels[:] = 0
    data._arrays.test.images.clamp_(min=1)
    return data


def test_finds_the_padding(examiner):
    data = one_class()
    tester = examiner(SeesBorder(data.mean, data.std), data)
    found = calibrate(tester, tester.predict(), ratios=(0.8, 1.5, 2.0))
    assert [point.ratio for point in found.sweep] == [0.8, 1.0, 1.5, 2.0]
    assert [point.tested_on.value for point in found.sweep] == [0, 0, 100, 100]
    assert found.best == 1.5  # of two as good the nearer
    assert (found.gain.value, found.gain.count) == (100, 40)
    assert 80 < found.gain.low < found.gain.high <= 100


def test_the_halves_are_apart_and_repeatable(examiner):
    tester = examiner()
    found, again = (calibrate(tester, tester.predict(), ratios=(0.7, 1.3), seed=5) for _ in range(2))
    assert found == again
    assert found != calibrate(tester, tester.predict(), ratios=(0.7, 1.3), seed=6)
    for point in found.sweep:
        right = tester.predict(crop_ratio=point.ratio).right
        halves = (point.chosen_on.value * point.chosen_on.count + point.tested_on.value * point.tested_on.count) / 100
        assert halves == pytest.approx(right.sum())
    best = max(found.sweep, key=lambda point: point.chosen_on.value)
    assert next(point for point in found.sweep if point.ratio == found.best).chosen_on.value == best.chosen_on.value


def test_one_half_chooses_and_the_other_tests():
    """1.2 is right on the half that chooses alone, 0.9 on the other one alone, the usual ratio nowhere."""
    chooses = _half(40, seed=3)
    right = {0.9: ~chooses, 1.0: np.zeros(40, dtype=bool), 1.2: chooses}
    predictions = {
        ratio: Predictions(np.arange(40), np.zeros(40), np.where(hit, 0, 1)[:, None], np.ones(40), np.ones(40))
        for ratio, hit in right.items()
    }
    tester = SimpleNamespace(
        subject=SimpleNamespace(crop_ratio=1.0), predict_again=lambda clean, crop_ratio, what: predictions[crop_ratio]
    )
    found = calibrate(tester, predictions[1.0], ratios=(0.9, 1.2), seed=3)
    assert (found.best, found.gain.value, found.gain.count) == (1.2, 0.0, 20)
    assert [(point.chosen_on.value, point.tested_on.value) for point in found.sweep] == [(0, 100), (0, 0), (100, 0)]


def test_the_gain_is_paired(examiner):
    tester = examiner()
    found = calibrate(tester, tester.predict(), ratios=(1.1, 1.25, 1.6), seed=1)
    assert found.best != 1.0
    usual, best = (tester.predict(crop_ratio=ratio).right for ratio in (1.0, found.best))
    tested = next(point for point in found.sweep if point.ratio == found.best).tested_on
    # Of all halves of this size, only the one that tests gives these counts for both ratios.
    assert found.gain.value == pytest.approx(
        tested.value - next(point for point in found.sweep if point.ratio == 1.0).tested_on.value
    )
    whole = difference_over_images(usual, best)
    assert found.gain.high - found.gain.low > whole.high - whole.low  # half the images say less


def test_nothing_to_gain(examiner):
    tester = examiner()
    found = calibrate(tester, tester.predict(), ratios=())
    assert (found.best, found.gain.value, found.gain.low) == (1.0, 0.0, None)


def test_one_image_is_not_enough(examiner):
    tester = examiner(limit=1)
    with pytest.raises(UserError, match="cannot be chosen on one image"):
        calibrate(tester, tester.predict())


def test_the_usual_ratio_is_the_subject_s(examiner):
    """So that its predictions are those of the accuracy suite, and come from the cache."""
    tester = examiner()
    assert np.array_equal(tester.predict().best, tester.predict(crop_ratio=tester.subject.crop_ratio).best)
