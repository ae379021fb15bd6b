"""The verdict on a claim, out of the 95 % interval of the difference, paired by seed.

With the difference taken so that the claimed side is the positive one, and its interval from low to high:

    claim                      reproduced          not reproduced               inconclusive
    higher, or lower           low > 0             high < 0                     else
    the same by b              low > 0, high ≥ b   high < b (or high < 0)       else
    not lower by more than b   low > −b            high < −b                    else

A claim of a size, then, is not reproduced either if the difference has the claimed sign but the interval rules out one
so large. Without an interval (fewer seeds than asked for, or the same difference in every seed) it is inconclusive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrefine.claims.metrics import METRICS
from vitrefine.claims.raw import Raw
from vitrefine.claims.schema import Claim, Ledger, Test
from vitrefine.errors import UserError
from vitrefine.report import words
from vitrefine.statistics import Estimate, over_seeds

Verdict = Literal["reproduced", "not reproduced", "inconclusive", "not run"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "not reproduced", "inconclusive", "not run")


@dataclass(frozen=True)
class Assessment:
    """What became of a claim."""

    verdict: Verdict
    reason: str
    difference: Estimate | None = None
    figures: Mapping[str, Estimate] | None = None  # of each spec, over the seeds that all have
    files: Mapping[str, Path] | None = None  # of each spec its raw results


def decide(test: Test, difference: Estimate) -> tuple[Verdict, str]:
    """The verdict on a difference, and why."""
    unit = METRICS[test.metric].difference
    if difference.count < test.seeds:
        return "inconclusive", f"{words.plural(difference.count, 'seed')} so far, of {test.seeds}"
    if difference.low is None or difference.high is None:
        return "inconclusive", "the same in every seed, which leaves no interval to take"
    ends = (difference.low, difference.high)
    low, high = ends if test.expect != "lower" else (-ends[1], -ends[0])
    size = f"{test.by:g} {unit}".strip() if test.by is not None else ""
    if test.expect == "not_lower":
        assert test.by is not None, "the schema asks for it"
        if low > -test.by:
            return "reproduced", f"any loss is below {size}"
        if high < -test.by:
            return "not reproduced", f"the loss is above {size}"
        return "inconclusive", f"the interval does not tell whether the loss is below {size}"
    if high < 0:
        return "not reproduced", f"it is {'lower' if test.expect == 'higher' else 'higher'} instead"
    if test.by is not None and high < test.by:
        return "not reproduced", f"the interval rules out a difference of {size}"
    return ("reproduced", f"{test.expect}, as claimed") if low > 0 else ("inconclusive", "zero is within the interval")


def assess(claim: Claim, raws: Mapping[Path, Raw]) -> Assessment:
    """The verdict on a claim that is no repetition, out of all raw results."""
    if claim.test is None:
        assert claim.not_run is not None, "repetitions are assessed as what they repeat"
        return Assessment("not run", claim.not_run)
    test = claim.test
    found = [_matching(test, spec, raws) for spec in test.specs]
    missing = [spec for spec, files in zip(test.specs, found, strict=True) if not files]
    if missing:
        return Assessment("not run", f"no results of {words.listing(list(map(test.name, missing)))} yet")
    files = _comparable(test, found, raws)
    if files is None:
        return Assessment("not run", "there are results, but of other images or settings for each spec")
    chosen = {spec: raws[path] for spec, path in files.items()}
    values = _paired(test, chosen)
    if not values:
        return _without_figures(test, chosen, files)
    figures = {spec: over_seeds([each[spec] for each in values.values()]) for spec in test.specs}
    difference = over_seeds([_difference(test, each) for each in values.values()])
    verdict, reason = decide(test, difference)
    return Assessment(verdict, reason, difference, figures, files)


def _without_figures(test: Test, raws: Mapping[str, Raw], files: Mapping[str, Path]) -> Assessment:
    """Why there is no seed for which all specs have the metric."""
    for spec, raw in raws.items():
        if not raw.by_seed:
            return Assessment("inconclusive", f"no run of `{spec}` came to an end", files=files)
        if not raw.values(test.metric):
            return Assessment("not run", f"{METRICS[test.metric].words} was not measured for `{spec}`")
    one = " on one machine" if METRICS[test.metric].of_machine else ""
    return Assessment("inconclusive", f"there is no seed that all specs have{one}", files=files)


def _matching(test: Test, spec: str, raws: Mapping[Path, Raw]) -> list[Path]:
    """The files with results of a spec for a test."""
    wanted = {key: str(value) for key, value in test.settings.items()}
    asked = (spec, test.data, test.recipe, test.weights)
    return [
        path
        for path, raw in raws.items()
        if (raw.base_spec, raw.data, raw.recipe, raw.weights) == asked and wanted.items() <= raw.settings.items()
    ]


def _comparable(test: Test, found: Sequence[Sequence[Path]], raws: Mapping[Path, Raw]) -> dict[str, Path] | None:
    """One file of each spec, on the same images and with the same settings."""
    groups: dict[object, dict[str, Path]] = {}
    for spec, paths in zip(test.specs, found, strict=True):
        for path in paths:
            group = groups.setdefault(raws[path].comparable, {})
            if spec in group:
                both = f"{group[spec].name} and {path.name} both"
                raise UserError(f"{both} have results of {spec} with recipe {test.recipe}; move one of them away")
            group[spec] = path
    whole = [files for files in groups.values() if len(files) == len(test.specs)]
    if len(whole) > 1:
        one, other = (raws[files[test.second]] for files in whole[:2])
        apart = [key for key in one.settings if one.settings[key] != other.settings.get(key)]
        remedy = f"say under settings which {apart[0]} is meant" if apart else "move those of the other images away"
        names = " and ".join(files[test.second].name for files in whole[:2])
        raise UserError(f"{names} both have results of {test.second} with recipe {test.recipe}; {remedy}")
    return whole[0] if whole else None


def _paired(test: Test, raws: Mapping[str, Raw]) -> dict[int, dict[str, float]]:
    """By seed, the value of each spec, for the seeds that all have."""
    values = {spec: raw.values(test.metric) for spec, raw in raws.items()}
    common = sorted(set.intersection(*(set(each) for each in values.values())))
    if METRICS[test.metric].of_machine:
        common = [seed for seed in common if len({raw.by_seed[seed].hardware for raw in raws.values()}) == 1]
    return {seed: {spec: each[seed] for spec, each in values.items()} for seed in common}


def _difference(test: Test, values: Mapping[str, float]) -> float:
    """Of one seed."""
    difference = values[test.second] - (values[test.first] if test.first else 0.0)
    return difference - (values[test.less.second] - values[test.less.first]) if test.less else difference


def assess_all(ledger: Ledger, raws: Mapping[Path, Raw]) -> dict[str, Assessment]:
    """Of each claim, by id; a repetition has the assessment of what it repeats."""
    own = {name: assess(claim, raws) for name, claim in ledger.claims.items() if claim.same_as is None}
    return {name: own[claim.same_as or name] for name, claim in ledger.claims.items()}
