"""From folders to what a page is made of."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vitrefine.errors import UserError
from vitrefine.report.plan import Plan, read_plan
from vitrefine.report.results import Group, Run, group, read
from vitrefine.train.run import find_runs, read_run


@dataclass(frozen=True)
class Collection:
    """Runs in groups that may be compared, and the comparisons that they were trained for."""

    groups: list[Group]
    plans: list[Plan]
    folders: list[Path]
    left_out: list[str]  # a sentence for each run that is damaged


def collect(folders: Sequence[Path], errors: Mapping[tuple[str, int], str] = MappingProxyType({})) -> Collection:
    """All runs in some folders and the folders in them.

    The first spec of the first folder is the baseline: of a comparison as it was planned, else that of the run that
    began first. A run that is damaged does not cost the others their page, unless it is named itself.

    Args:
        folders: Of runs, of comparisons, or of such folders.
        errors: By spec and seed, why a run that was planned could not even begin.
    """
    plans: list[Plan] = []
    runs: dict[Path, Run] = {}
    damaged: dict[Path, str] = {}
    for folder in folders:
        found = []
        for place in find_runs(folder):
            try:
                found.append(read(read_run(place)))
            except UserError as error:
                if place == folder:
                    raise
                damaged[place.resolve()] = str(error)
        found.sort(key=lambda run: run.started)
        plan = read_plan(folder)
        if plan is not None:
            plans.append(plan)
            found += _missing(plan, found, folder, errors, damaged)
            ranks = {spec: rank for rank, spec in enumerate(plan.specs)}
            found.sort(key=lambda run: ranks.get(run.spec, len(ranks)))
        for run in found:
            runs.setdefault(run.folder.resolve(), run)
    if not runs:
        where = ", ".join(map(str, folders))
        if damaged:
            raise UserError(f"no run in {where} can be read: {next(iter(damaged.values()))}")
        raise UserError(f"there is no run in {where}; `vitrefine train` makes one")
    return Collection(group(runs.values()), plans, list(folders), list(damaged.values()))


def _missing(
    plan: Plan,
    found: Sequence[Run],
    folder: Path,
    errors: Mapping[tuple[str, int], str],
    damaged: Container[Path],
) -> Iterable[Run]:
    """Runs that were planned but have no folder, or one that cannot be read."""
    there = {(run.spec, run.seed) for run in found}
    for spec, seed in itertools.product(plan.specs if found or errors else (), range(plan.seeds)):
        if (spec, seed) not in there:
            error = errors.get((spec, seed), "")
            status = "damaged" if (folder / plan.folder(spec, seed)).resolve() in damaged else "missing"
            yield Run(
                folder=folder / f"{spec} seed {seed}",
                spec=spec,
                fitted=spec,
                seed=seed,
                data=plan.data,
                fingerprint=found[0].fingerprint if found else "",
                recipe_name=plan.recipe_name,
                recipe=plan.recipe,
                status="failed" if error else status,
                weights=plan.weights or "",
                error=error,
            )
