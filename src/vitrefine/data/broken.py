"""Keeping count of what could not be read, and stopping when it is too much."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from vitrefine.errors import UserError


class Broken(NamedTuple):
    """One thing that could not be read."""

    name: str
    reason: str
    images: int = 1
    """How many images are lost with it."""


class BrokenCount:
    """Counts broken images and shards, each once, and raises when more than a share of all images are lost."""

    def __init__(self, data: str, images: int, share: float) -> None:
        self.skipped: Counter[str] = Counter()
        self._data, self._images, self._share = data, images, share
        self._seen: dict[str, Broken] = {}

    @property
    def limit(self) -> int:
        """Broken images that are borne."""
        return int(self._images * self._share)

    def add(self, broken: Iterable[Broken]) -> None:
        for one in broken:
            if one.name in self._seen:
                continue
            self._seen[one.name] = one
            self.skipped[one.reason] += 1
        lost = sum(one.images for one in self._seen.values())
        if lost > self.limit:
            self._stop(lost)

    def _stop(self, lost: int) -> None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
        first = next(iter(self._seen))
        raise UserError(
            f"{lost} of the {self._images} images of {self._data} cannot be read ({reasons}; first {first}), and "
            f"data.max_broken = {self._share:g} allows {self.limit}; mend or remove them"
        )
