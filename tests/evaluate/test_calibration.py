"""ECE and the reliability table on cases worked out by hand."""

import numpy as np
import pytest

from vitrefine.evaluate.calibration import BINS, expected_calibration_error, reliability


def test_by_hand():
    """Two bins: three images of 0.3, 0.4, 0.5 with one right; two of 0.6 and 1.0, both right."""
    table = reliability([0.3, 0.4, 0.5, 0.6, 1.0], [True, False, False, True, True], bins=2)
    assert [(each.low, each.high, each.images) for each in table] == [(0, 50, 3), (50, 100, 2)]
    assert [each.confidence for each in table] == pytest.approx([40, 80])
    assert [each.accuracy for each in table] == pytest.approx([100 / 3, 100])
    assert expected_calibration_error(table) == pytest.approx(3 / 5 * (40 - 100 / 3) + 2 / 5 * 20)


def test_perfectly_calibrated():
    table = reliability([0.75] * 4, [True, True, True, False])
    assert expected_calibration_error(table) == pytest.approx(0)


@pytest.mark.parametrize(("right", "error"), [(True, 0.0), (False, 100.0)])
def test_certain(right, error):
    assert expected_calibration_error(reliability([1.0] * 7, [right] * 7)) == pytest.approx(error)


def test_edges_belong_to_the_bin_below():
    """(0, 1/15], (1/15, 2/15] …: an image on an edge is counted once, and 0 is in the first bin."""
    edges = np.arange(BINS + 1) / BINS
    table = reliability(edges, np.zeros(BINS + 1, dtype=bool))
    assert [each.images for each in table] == [2] + [1] * (BINS - 1)


def test_empty_bins_say_so():
    table = reliability([0.99], [True])
    assert len(table) == 15
    assert all((each.images, each.confidence, each.accuracy) == (0, None, None) for each in table[:-1])


def test_against_a_plain_loop():
    chance = np.random.default_rng(0)
    sure = chance.random(1000)
    right = chance.random(1000) < sure**2
    expected = 0.0
    for number in range(BINS):
        inside = [i for i in range(1000) if number / BINS < sure[i] <= (number + 1) / BINS]
        if inside:
            gap = np.mean([right[i] for i in inside]) - np.mean([sure[i] for i in inside])
            expected += len(inside) / 1000 * abs(gap)
    assert expected_calibration_error(reliability(sure, right)) == pytest.approx(100 * expected, abs=1e-9)
