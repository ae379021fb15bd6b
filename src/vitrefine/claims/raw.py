"""Raw results: one file a spec, with all runs of it on the same images, by the same recipe, from the same weights.

A file is written by `vitrefine claims --add`, never by hand. Runs that failed are in it as well. Of several finished
runs with one seed the first that was started counts: a figure is not replaced because a later one is nicer.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vitrefine.files import replace_file
from vitrefine.train.saved import read_saved

FOLDER = "results"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RawRun(_Strict):
    """One training."""

    seed: int
    status: str
    """`finished`, `failed`, `killed` or `stopped`."""
    error: str = ""
    started: str
    metrics: dict[str, float] = {}
    correct: str = ""
    """A bit for each test image, in hexadecimal digits."""
    seconds: float | None = None
    at_once: int = 1
    """Runs that shared the hardware, this one among them."""
    hardware: str
    versions: dict[str, str] = {}


class Raw(_Strict):
    """All runs of a spec that may be averaged."""

    spec: str
    """With the arguments that fit it to the data."""
    base_spec: str
    """As it was asked for, canonical."""
    data: str
    fingerprint: str
    test_images: int | None = None
    recipe: str
    weights: str | None = None
    settings: dict[str, str]
    params: int | None = None
    macs: int | None = None
    commands: Annotated[list[str], Field(min_length=1)]
    """What to type for one seed, in this order; $seed stands for it."""
    runs: list[RawRun]

    @property
    def by_seed(self) -> dict[int, RawRun]:
        """Of each seed the finished run that counts."""
        finished = [run for run in self.runs if run.status == "finished"]
        latest_first = sorted(finished, key=lambda run: run.started, reverse=True)
        found = {run.seed: run for run in latest_first}
        return {seed: found[seed] for seed in sorted(found)}

    @property
    def unfinished(self) -> list[RawRun]:
        """Runs that came to no result, of seeds that another run may have finished."""
        return [run for run in self.runs if run.status != "finished"]

    def values(self, metric: str) -> dict[int, float]:
        """A metric by seed, where it was measured."""
        return {seed: run.metrics[metric] for seed, run in self.by_seed.items() if metric in run.metrics}

    @property
    def comparable(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """The same for files whose figures may be set against each other."""
        return self.fingerprint, self.weights or "", tuple(sorted(self.settings.items()))

    @property
    def rerun(self) -> str:
        """What to type for all seeds at once."""
        seeds = " ".join(str(seed) for seed in sorted({run.seed for run in self.runs}))
        return f"for seed in {seeds}; do {'; '.join(self.commands)}; done"


def read_raw(path: Path) -> Raw:
    """The results in a file."""
    return read_saved(path, TypeAdapter(Raw), "make it again with vitrefine claims --add")


def read_raws(docs: Path) -> dict[Path, Raw]:
    """All raw results of the documentation; other JSON files have no place beside them."""
    return {path: read_raw(path) for path in sorted((docs / FOLDER).glob("*.json"))}


def write_raw(path: Path, raw: Raw) -> None:
    """Write a file."""
    replace_file(path, (json.dumps(raw.model_dump(), indent=1, ensure_ascii=False) + "\n").encode())


def merged(old: Iterable[RawRun], new: Iterable[RawRun]) -> list[RawRun]:
    """All runs; one that was added before, and has since been resumed or diagnosed, as it is now."""
    runs = {(run.seed, run.started): run for run in [*old, *new]}
    return [runs[key] for key in sorted(runs)]
