"""Receptive-field calibration (Refiner, Section 4.4 and Table 5): the crop at test time, chosen for a model.

The crop ratio is the side of what a model sees over that of the resized image. Below 1 the edge is cut off; above 1,
which is the paper's RFC, the whole image is seen with zeros (black) around it. The best ratio of a sweep is the best
partly by chance, so it is chosen on one half of the test images, and what it gains is measured on the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vitrefine.data.order import generator_of
from vitrefine.errors import UserError
from vitrefine.evaluate.predictions import Examiner, Predictions
from vitrefine.statistics import Estimate, difference_over_images, over_images

RATIOS = (0.8, 0.85, 0.875, 0.9, 0.95, 1.0, 1.02, 1.05, 1.08, 1.1, 1.13, 1.15, 1.2)


@dataclass(frozen=True)
class Point:
    """Accuracy in per cent at a crop ratio, on the half that chooses and on the half that tests."""

    ratio: float
    chosen_on: Estimate
    tested_on: Estimate


@dataclass(frozen=True)
class Calibration:
    """A sweep over crop ratios, and what the best of them gains."""

    usual: float
    """The ratio without calibration."""
    best: float
    """The best on the half that chooses."""
    gain: Estimate
    """Points that it gains on the other half, paired; without an interval where the best is the usual one."""
    sweep: list[Point]


def calibrate(
    examiner: Examiner, clean: Predictions, *, ratios: Sequence[float] = RATIOS, seed: int = 0
) -> Calibration:
    """Sweep over crop ratios.

    Args:
        examiner: Of the model and the images.
        clean: What the model predicts at its usual ratio, with which the others are compared.
        ratios: To try.
        seed: Of the halves.
    """
    usual = examiner.subject.crop_ratio
    swept = sorted({*ratios, usual})
    chooses = _half(len(clean), seed)
    found = {r: examiner.predict_again(clean, crop_ratio=r, what=f"crop ratio {r:g}") for r in swept}
    best = max(swept, key=lambda ratio: (*_merit(found[ratio], chooses), -abs(ratio - usual)))
    gain = Estimate(0.0, None, None, "images", int((~chooses).sum()))
    if best != usual:
        gain = difference_over_images(found[usual].right[~chooses], found[best].right[~chooses])
    points = [Point(r, over_images(found[r].right[chooses]), over_images(found[r].right[~chooses])) for r in swept]
    return Calibration(usual, best, gain, points)


def _merit(predictions: Predictions, chosen: NDArray[np.bool_]) -> tuple[float, float]:
    """Accuracy; the loss decides between ratios of the same, which are many where images are few."""
    return float(predictions.right[chosen].mean()), -float(predictions.loss[chosen].mean())


def _half(images: int, seed: int) -> NDArray[np.bool_]:
    if images < 2:
        raise UserError("a crop ratio cannot be chosen on one image; give at least 2")
    chosen = np.zeros(images, dtype=bool)
    chosen[torch.randperm(images, generator=generator_of(seed, images))[: images // 2].numpy()] = True
    return chosen
