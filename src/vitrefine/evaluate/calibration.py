"""Whether a model is as sure as it is right (Guo et al., 2017, "On Calibration of Modern Neural Networks").

Images are sorted into bins of equal width by how sure the model is of its best class, the b-th being ((b-1)/B, b/B].
ECE = Σ_b n_b/N · |accuracy_b − confidence_b|: by how much the two differ, on average. In per cent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Images of which the model is about equally sure; all in per cent, None where there are no images."""

    low: float
    high: float
    images: int
    confidence: float | None
    accuracy: float | None


def reliability(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> list[Bin]:
    """The reliability table.

    Args:
        confidence: Probability of the best class of each image.
        right: Whether it is the image's.
        bins: How many.
    """
    sure, hit = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=bool)
    edges = np.arange(bins + 1) / bins
    place = np.clip(np.searchsorted(edges, sure, side="left") - 1, 0, bins - 1)
    table = []
    for number in range(bins):
        inside = place == number
        images = int(inside.sum())
        means = (float(100 * sure[inside].mean()), float(100 * hit[inside].mean())) if images else (None, None)
        table.append(Bin(100 * edges[number], 100 * edges[number + 1], images, *means))
    return table


def expected_calibration_error(table: list[Bin]) -> float:
    """ECE of a reliability table, in per cent."""
    total = sum(each.images for each in table)
    gaps = (
        each.images * abs(each.accuracy - each.confidence)
        for each in table
        if each.accuracy is not None and each.confidence is not None
    )
    return sum(gaps) / total
