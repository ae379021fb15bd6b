"""Accuracies and their differences, with 95 % intervals.

Two sources of chance are told apart, and an estimate says which of them its interval is over:

- *seeds*: train again with other seeds, test on the same images. From two runs or more, by Student's t
  (mean ± t · s/√n with n − 1 degrees of freedom); differences are taken seed by seed before anything is averaged.
- *images*: test the same weights on other images of the same kind. All that one run can tell: Wilson's interval for
  a share, and for a difference Bonett and Price's (2012) for paired shares: with b images that only the second model
  gets right and c that only the first does, out of n,
  (b − c)/(n + 2) ± z · √(b' + c' − (b' − c')²)/√(n + 2), where b' = (b + 1)/(n + 2) and c' = (c + 1)/(n + 2).

Everything is in per cent, differences in points of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
_UPPER = (1 + CONFIDENCE) / 2

Bits = NDArray[np.bool_]  # one a test image: whether the model was right


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval; there is none where values that do not vary, or are alone, leave it open."""

    value: float
    low: float | None
    high: float | None
    over: Literal["seeds", "images"]
    count: int  # of seeds, or of images

    @property
    def sign(self) -> int | None:
        """1 or -1 if the interval lies on one side of zero, 0 if zero is within, None without an interval."""
        if self.low is None or self.high is None:
            return None
        return int(self.low > 0) - int(self.high < 0)

    @property
    def spread(self) -> float | None:
        """The standard deviation from seed to seed, if that is what the interval is over."""
        if self.low is None or self.high is None or self.over != "seeds":
            return None
        return (self.high - self.low) / (2 * half_width(1.0, self.count))


def half_width(spread: float, count: int) -> float:
    """Half of the interval that so many seeds of such a standard deviation leave."""
    return float(stdtrit(count - 1, _UPPER)) * spread / math.sqrt(count)


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value a seed."""
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1)) if count > 1 else 0.0
    # Shares of a finite test set can coincide in every seed; that is no certainty, so it is no interval of width zero.
    if spread <= 1e-9 * max(1.0, abs(mean)):
        return Estimate(mean, None, None, "seeds", count)
    half = half_width(spread, count)
    return Estimate(mean, mean - half, mean + half, "seeds", count)


def over_images(right: Bits) -> Estimate:
    """The share of test images that one model gets right."""
    count = len(right)
    share, z = float(right.mean()), float(ndtri(_UPPER))
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    # At 0 and at all images right, the end is exact, whatever rounding says.
    low, high = (0.0 if share == 0 else centre - half), (1.0 if share == 1 else centre + half)
    return Estimate(100 * share, 100 * low, 100 * high, "images", count)


def difference_over_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """How much more the second has than the first, from the seeds that both have; None if there is no such seed."""
    common = sorted(first.keys() & second.keys())
    return over_seeds([second[seed] - first[seed] for seed in common]) if common else None


def difference_over_images(first: Bits, second: Bits) -> Estimate:
    """How much larger a share of the same images the second model gets right."""
    count = len(first)
    gained, lost = int((second & ~first).sum()), int((first & ~second).sum())
    b, c = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = float(ndtri(_UPPER)) * math.sqrt((b + c - (b - c) ** 2) / (count + 2))
    low, high = max(-1.0, b - c - half), min(1.0, b - c + half)
    return Estimate(100 * (gained - lost) / count, 100 * low, 100 * high, "images", count)


def accuracy(right: Mapping[int, Bits]) -> Estimate | None:
    """A model's accuracy from its runs, by seed: over seeds if there are several, else over images."""
    if not right:
        return None
    if len(right) == 1:
        return over_images(next(iter(right.values())))
    return over_seeds([100 * float(bits.mean()) for bits in right.values()])


def difference(first: Mapping[int, Bits], second: Mapping[int, Bits]) -> Estimate | None:
    """How much more accurate the second model is, paired by seed, or by image where they share just one seed."""
    common = first.keys() & second.keys()
    if any(len(first[seed]) != len(second[seed]) for seed in common):
        return None  # broken images were left out of one test, but not of the other
    if len(common) == 1:
        (seed,) = common
        return difference_over_images(first[seed], second[seed])
    return difference_over_seeds(
        *({seed: 100 * float(bits.mean()) for seed, bits in runs.items()} for runs in (first, second))
    )
