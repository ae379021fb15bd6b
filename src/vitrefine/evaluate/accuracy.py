"""How often a model is right, and how well it knows.

On ImageNet's validation images the ReaL labels (Beyer et al., 2020) are used besides: an image counts as right if the
prediction is one of its labels, and not at all if it has none. On ImageNet-A a model chooses among its 200 classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitrefine.data.dataset import DataSet
from vitrefine.data.imagenet import imagenet_a_classes, real_hits, real_labels
from vitrefine.errors import UserError
from vitrefine.evaluate.calibration import Bin, expected_calibration_error, reliability
from vitrefine.evaluate.predictions import BEST, Predictions
from vitrefine.statistics import Estimate, over_images


@dataclass(frozen=True)
class Accuracy:
    """In per cent, with Wilson's 95 % intervals over images."""

    top1: Estimate
    top5: Estimate | None
    """None where there are no more than five classes."""
    real: Estimate | None
    """By ReaL labels, where there are such."""
    loss: float
    """Mean cross-entropy, in nats."""
    ece: float
    confidence: float
    reliability: list[Bin]


def measure_accuracy(predictions: Predictions, data: DataSet) -> Accuracy:
    """Accuracy and calibration of predictions for images of a set."""
    table = reliability(predictions.confidence, predictions.right)
    return Accuracy(
        top1=over_images(predictions.right),
        top5=over_images(predictions.among_best) if len(data.classes) > BEST else None,
        real=_by_real_labels(predictions, data),
        loss=float(predictions.loss.mean()),
        ece=expected_calibration_error(table),
        confidence=float(100 * predictions.confidence.mean()),
        reliability=table,
    )


def choices(data: DataSet) -> Sequence[int] | None:
    """The classes among which a model may choose on a set; None for all."""
    return imagenet_a_classes() if data.name.startswith("imagenet-a:") else None


def _by_real_labels(predictions: Predictions, data: Any) -> Estimate | None:
    if not data.name.startswith("imagenet:"):
        return None
    names = data.test_source.file_names()
    try:
        labels = real_labels([names[number] for number in predictions.index])
    except UserError:
        return None  # these are not ImageNet's validation images, or bear other names
    hits, counted = real_hits(torch.from_numpy(predictions.best[:, 0]), labels)
    return over_images(hits[counted].numpy()) if bool(counted.any()) else None
