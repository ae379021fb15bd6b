"""From folders to what a page is made of."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vitrefine.errors import UserError
from vitrefine.report.plan import Plan, read_plan
from vitrefine.report.results import Group, Run, group, read
from vitrefine.train.run import list_runs


@dataclass(frozen=True)
class Collection:
    """Runs in groups that may be compared, and the comparisons that they were trained for."""

    groups: list[Group]
    plans: list[Plan]
    folders: list[Path]


def collect(folders: Sequence[Path], errors: Mapping[tuple[str, int], str] = MappingProxyType({})) -> Collection:
    """All runs in some folders and the folders in them.

    The first spec of the first comparison is the baseline; without a comparison, that of the run that began first in
    the first folder.

    Args:
        folders: Of runs, of comparisons, or of such folders.
        errors: By spec and seed, why a run that was planned could not even begin.
    """
    plans: list[Plan] = []
    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give folders of runs, or folders that hold such")
        found = sorted((read(info) for info in list_runs(folder)), key=lambda run: run.started)
        plan = read_plan(folder)
        if plan is not None:
            plans.append(plan)
            found += _missing(plan, found, folder, errors)
        for run in found:
            runs.setdefault(run.folder.resolve(), run)
    if not runs:
        raise UserError(f"there is no run in {', '.join(map(str, folders))}; `vitrefine train` makes one")
    order = [spec for plan in plans for spec in plan.specs]
    return Collection(group(runs.values(), order), plans, list(folders))


def _missing(plan: Plan, found: Sequence[Run], folder: Path, errors: Mapping[tuple[str, int], str]) -> Iterable[Run]:
    """Runs that were planned but have no folder."""
    there = {(run.spec, run.seed) for run in found}
    for spec, seed in itertools.product(plan.specs if found else (), range(plan.seeds)):
        if (spec, seed) not in there:
            like, error = found[0], errors.get((spec, seed), "")
            yield Run(
                folder=folder / f"{spec} seed {seed}",
                spec=spec,
                fitted=spec,
                seed=seed,
                data=like.data,
                fingerprint=like.fingerprint,
                recipe_name=like.recipe_name,
                recipe=like.recipe,
                status="failed" if error else "missing",
                weights=like.weights,
                error=error,
            )
