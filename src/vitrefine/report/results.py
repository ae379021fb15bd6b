"""Runs sorted for comparison: into groups that may be compared, in each the specs, of each its runs by seed.

Accuracies may be compared where the images and the recipe were the same. Runs that differ in either are put into groups
of their own rather than refused: one page can then hold a whole folder of runs, and never sets one figure against
another that it does not belong beside.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from vitrefine.statistics import Bits
from vitrefine.train.job import Result
from vitrefine.train.resume import deciding
from vitrefine.train.run import Epoch, RunInfo

_QUOTED = r'"(?:\\.|[^"\\])*"'
_ARGUMENTS = re.compile(rf'({_QUOTED})|\((?:{_QUOTED}|[^()"])*\)')  # a bracket within quotes is text


@dataclass(frozen=True)
class Run:
    """One training: a spec, a seed, and what came of it."""

    folder: Path
    spec: str  # as it was asked for
    fitted: str  # with the arguments that fit it to the data
    seed: int
    data: str
    fingerprint: str
    recipe_name: str
    recipe: str  # YAML
    status: str
    weights: str = ""  # that it started from; from scratch if empty
    error: str = ""
    params: int | None = None
    macs: int | None = None
    device: str = ""
    alone: bool = True  # on its device, so that its speed is its own
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    epochs: Sequence[Epoch] = ()
    result: Result | None = None
    right: Bits | None = None  # whether the model was right, one a test image

    @property
    def finished(self) -> bool:
        return self.status == "finished" and self.result is not None

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the recipe that decide what is computed, flat: `optim.lr`."""
        return {key: str(value) for key, value in deciding(yaml.safe_load(self.recipe)).items()}

    @property
    def conditions(self) -> dict[str, str]:
        """The settings, and the weights that it started from."""
        return self.settings | ({"weights": self.weights} if self.weights else {})


def read(info: RunInfo) -> Run:
    """What a page needs to know of a run."""
    told, result = info.told, info.result
    return Run(
        folder=info.folder,
        spec=info.base_spec,
        fitted=info.spec,
        seed=info.seed,
        data=info.data,
        fingerprint=told.fingerprint,
        recipe_name=told.recipe,
        recipe=info.recipe_text,
        status=info.status,
        weights=told.weights or "",
        error=told.error,
        params=told.params,
        macs=told.macs,
        device=told.device,
        alone=info.alone,
        versions=told.versions,
        command=told.command,
        started=told.started or "",
        epochs=info.epochs,
        result=result,
        right=_unpacked(result) if result else None,
    )


def _unpacked(result: Result) -> Bits:
    packed = np.frombuffer(bytes.fromhex(result.correct), dtype=np.uint8)
    return np.unpackbits(packed, count=result.test_images).astype(bool)


@dataclass(frozen=True)
class Arm:
    """A spec and its runs."""

    label: str  # "+cb" where it continues the first spec of its group, else the spec
    spec: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> dict[int, Run]:
        """The finished runs by seed; of two with one seed the later."""
        runs = [run for run in sorted(self.runs, key=lambda run: run.started) if run.finished]
        return {run.seed: run for run in sorted(runs, key=lambda run: run.seed)}

    @property
    def unfinished(self) -> list[Run]:
        """Runs that failed, stopped or are still going, without those whose seed another run has finished."""
        return [run for run in self.runs if not run.finished and run.seed not in self.finished]

    @property
    def replaced(self) -> list[Run]:
        """Runs that say nothing, because a later one has the same spec and seed."""
        return [run for run in self.runs if run.finished and self.finished[run.seed] is not run]

    @property
    def right(self) -> dict[int, Bits]:
        return {seed: run.right for seed, run in self.finished.items() if run.right is not None}


@dataclass(frozen=True)
class Group:
    """Runs on the same images with the same recipe; the first spec is what the others are compared with."""

    arms: tuple[Arm, ...]

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})


def group(runs: Iterable[Run]) -> list[Group]:
    """The groups of some runs, and in each the specs, in the order in which their first runs come."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], dict[str, list[Run]]] = {}
    for run in runs:
        alike = run.fingerprint, frozenset(run.conditions.items())
        found.setdefault(alike, {}).setdefault(run.spec, []).append(run)
    return [_group(specs) for specs in found.values()]


def _group(specs: Mapping[str, list[Run]]) -> Group:
    first = next(iter(specs))
    return Group(tuple(Arm(label(spec, first), spec, tuple(runs)) for spec, runs in specs.items()))


def label(spec: str, first: str) -> str:
    """What a spec is called beside the first one: `+cb` where it continues that, else as it is."""
    return spec.removeprefix(first) if spec.startswith(f"{first}+") else spec


def bare(spec: str) -> str:
    """A spec without its arguments."""
    return _ARGUMENTS.sub(r"\1", spec)


def shortened(labels: Sequence[str]) -> dict[str, str]:
    """Labels without their arguments, where that tells them apart."""
    names = [bare(label) for label in labels]
    return {label: name if names.count(name) == 1 else label for label, name in zip(labels, names, strict=True)}
