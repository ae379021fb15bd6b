"""The page's section on evaluations: what `vitrefine evaluate` left in the folders of runs.

Figures stand side by side only where images, size, crop, precision and seed were the same. Over several runs of a spec
they are averaged, with Student's interval over seeds, and compared with the first spec's seed by seed; a single run's
have the interval that its evaluation gave.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitrefine.evaluate.evaluation import FILE, read_evaluations
from vitrefine.evaluate.subject import fingerprint
from vitrefine.report import words
from vitrefine.report.charts import Chart
from vitrefine.report.evaluation_charts import reliability_chart, sweep_chart
from vitrefine.report.findings import short_names
from vitrefine.report.results import Group, Run
from vitrefine.statistics import Estimate, difference_over_seeds, over_seeds
from vitrefine.surgery.checkpoint import load
from vitrefine.train.run import MODEL

Found = Mapping[str, Any]
BySeed = dict[int, Found]
Cell = tuple[str, str, str]  # a figure, its interval, and its difference to the first spec's

NOTHING: Cell = ("–", "", "")


@dataclass(frozen=True)
class Sitting:
    """Evaluations that may stand side by side."""

    title: str
    columns: Sequence[int]
    """Places of specs in the group."""
    rows: Sequence[tuple[str, str, Sequence[Cell]]]
    """What is measured, its unit, and a cell for each spec."""
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Line:
    """A row of the table: how to find its figure in an evaluation, and how to print it."""

    label: str
    unit: str
    find: Callable[[Found], Any]
    digits: int | None = None
    """Decimals; by the number of images if None."""


def evaluations(name: str, group: Group) -> dict[str, Any] | None:
    """What the page shows; None where no run was evaluated.

    Args:
        name: Begins all ids in it.
        group: The runs.
    """
    try:
        found, notes = _collected(group)
        labels = list(short_names(group).values())
        sittings = [_sitting(f"{name}-{i}", by_spec, labels) for i, by_spec in enumerate(found)]
    except (AttributeError, KeyError, TypeError, ValueError):  # the page is about more than this
        return {"sittings": [], "notes": [_damaged([run for run in group.runs if (run.folder / FILE).is_file()])]}
    return {"sittings": sittings, "notes": notes} if sittings or notes else None


def _damaged(runs: Sequence[Run]) -> str:
    files = [str(run.folder / FILE) for run in runs]
    which = f"One of {words.listing(files)}" if len(files) > 1 else files[0]
    return f"{which} is damaged, so that nothing is shown of it; delete it, and run vitrefine evaluate again."


def _collected(group: Group) -> tuple[list[dict[int, BySeed]], list[str]]:
    """Evaluations by how they were made, spec and seed; and why those of some runs are not among them."""
    sittings: dict[str, dict[int, BySeed]] = {}
    stale: list[Run] = []
    notes: list[str] = []
    for index, arm in enumerate(group.arms):
        for run in arm.finished.values():
            found = read_evaluations(run.folder)
            if not found and (run.folder / FILE).is_file():
                notes.append(_damaged([run]))
            if found and _is_newer(run) and not _is_of(run, found[-1]):
                stale.append(run)
                continue
            # The last is the newest; those of other weights were made before the run was trained again.
            for each in (each for each in found if each.get("weights") == found[-1].get("weights")):
                alike = json.dumps([each.get("fingerprint"), each.get("images"), _shared(each)], sort_keys=True)
                sittings.setdefault(alike, {}).setdefault(index, {})[run.seed] = each
    return list(sittings.values()), [*notes, *([_stale(stale)] if stale else [])]


def _shared(found: Found) -> dict[str, Any]:
    """Settings that must be the same; how images are normalised is the model's own affair."""
    settings = found.get("settings") or {}
    return {name: value for name, value in settings.items() if name not in ("mean", "std")}


def _is_newer(run: Run) -> bool:
    model = run.folder / MODEL
    return model.is_file() and model.stat().st_mtime > (run.folder / FILE).stat().st_mtime


def _is_of(run: Run, evaluation: Found) -> bool:
    """Whether the run's model is the one that was evaluated: in a folder that was copied, times tell nothing."""
    try:
        return fingerprint(load(run.folder / MODEL)) == evaluation.get("weights")
    except Exception:  # a model that cannot be loaded here, for whatever reason
        return False


def _stale(runs: Sequence[Run]) -> str:
    names = words.listing([str(run.folder) for run in runs])
    return f"Evaluations in {names} are older than the models there, and left out; run vitrefine evaluate again."


def _sitting(name: str, by_spec: Mapping[int, BySeed], labels: Sequence[str]) -> Sitting:
    columns = sorted(by_spec)
    runs = {index: list(by_spec[index].values()) for index in columns}
    first = runs[columns[0]][0]
    images = int(first.get("images") or 0)
    rows = []
    for line in _lines([each for found in runs.values() for each in found]):
        base = by_spec[columns[0]] if columns[0] == 0 else {}
        cells = [_cell(line, by_spec[i], base if i else {}, words.decimals(images)) for i in columns]
        if any(cell != NOTHING for cell in cells):
            rows.append((line.label, line.unit, cells))
    charts = [sweep_chart(f"{name}-rfc", runs, labels), reliability_chart(f"{name}-reliability", runs, labels)]
    return Sitting(_title(first, images), columns, rows, [chart for chart in charts if chart])


def _title(found: Found, images: int) -> str:
    settings = found.get("settings") or {}
    size = "×".join(map(str, settings.get("size") or []))
    crop = f", crop ratio {settings['crop_ratio']:g}" if settings.get("crop_ratio") else ""
    return f"{images:,} images of {found.get('data')}" + (f", {size} pixels" if size else "") + crop


def _lines(found: Sequence[Found]) -> Iterator[Line]:
    yield Line("top-1", "%", _path("accuracy", "top1"))
    yield Line("top-5", "%", _path("accuracy", "top5"))
    yield Line("top-1 by ReaL labels", "%", _path("accuracy", "real"))
    yield Line("calibration error (ECE)", "%", _path("accuracy", "ece"), 1)
    yield Line("cross-entropy", "nats", _path("accuracy", "loss"), 3)
    changes = {each["name"]: each["label"] for one in found for each in one.get("robustness") or ()}
    for name, label in changes.items():
        yield Line(label, "%", _trial(name))
    yield Line("best crop ratio (RFC)", "", _path("rfc", "best"), 2)
    yield Line("its gain", "points", _path("rfc", "gain"))
    speeds = [each["speed"] for each in found if each.get("speed")]
    for device, batch in dict.fromkeys((each.get("device"), each.get("batch")) for each in speeds):
        made, place = {"device": device, "batch": batch}, f"{batch} at once on {device}"
        yield Line(f"images/s in inference, {place}", "", _speed(made, "images_per_s"), 0)
        yield Line(f"peak memory, {place}", "MiB", _speed(made, "memory_mib"), 0)
    for device in dict.fromkeys(each.get("device") for each in speeds):
        yield Line(f"latency of one image on {device}", "ms", _speed({"device": device}, "latency_ms", "p50"), 2)


def _path(*names: str) -> Callable[[Found], Any]:
    def find(found: Any) -> Any:
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    return find


def _speed(made: Mapping[str, Any], *names: str) -> Callable[[Found], Any]:
    """A figure of speed, if it was made on this device with this batch."""
    find = _path("speed", *names)
    return lambda found: find(found) if made.items() <= (found.get("speed") or {}).items() else None


def _trial(name: str) -> Callable[[Found], Any]:
    return lambda found: next(
        (each.get("accuracy") for each in found.get("robustness") or () if each.get("name") == name), None
    )


def _cell(line: Line, found: BySeed, base: BySeed, digits: int) -> Cell:
    own, others = (
        {seed: each for seed, one in runs.items() if (each := _estimate(line.find(one)))} for runs in (found, base)
    )
    if not own:
        return NOTHING
    estimate = next(iter(own.values())) if len(own) == 1 else over_seeds([each.value for each in own.values()])
    digits = (digits if line.digits is None else line.digits) or words.rate_digits(estimate.value)
    signed = line.unit == "points"
    below = words.half_width(estimate, digits) if estimate.over == "seeds" else words.interval(estimate, digits, signed)
    return words.number(estimate.value, digits, signed), below, _difference(own, others, digits)


def _difference(own: Mapping[int, Estimate], base: Mapping[int, Estimate], digits: int) -> str:
    """`+0.8 (+0.1 … +1.5)`, from two seeds or more that both specs have."""
    first, second = ({seed: each.value for seed, each in runs.items()} for runs in (base, own))
    found = difference_over_seeds(first, second)
    if found is None or found.count < 2:
        return ""
    digits = words.enough(found, digits)
    ends = words.interval(found, digits, signed=True)
    return words.number(found.value, digits, signed=True) + (f" ({ends})" if ends else "")


def _estimate(found: Any) -> Estimate | None:
    """A figure with its interval as JSON has it, or a bare number."""
    if isinstance(found, int | float):
        return Estimate(float(found), None, None, "images", 1)
    if not isinstance(found, Mapping) or not isinstance(found.get("value"), int | float):
        return None
    over: Literal["seeds", "images"] = "seeds" if found.get("over") == "seeds" else "images"
    return Estimate(found["value"], found.get("low"), found.get("high"), over, int(found.get("count") or 1))
