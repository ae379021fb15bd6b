"""What did not go as planned, a sentence each."""

from collections.abc import Iterator

from vitrefine.report import words
from vitrefine.report.findings import short_names
from vitrefine.report.results import Arm, Group, Run

_UNREAD = {"missing": "has not begun", "damaged": "is damaged"}


def problems(group: Group) -> list[str]:
    """What a reader has to know of a group's runs besides their figures."""
    names = short_names(group)
    told = [f"{names[arm.label]}{sentence}" for arm in group.arms for sentence in _of_runs(arm)]
    for arm in group.arms[1:]:
        alone = sorted(arm.finished.keys() - group.baseline.finished.keys())
        if alone and len(alone) < len(arm.finished):
            seeds = f"seed{'' if len(alone) == 1 else 's'} {words.listing(list(map(str, alone)))}"
            unpaired = f"what {seeds} gave is not in its difference, for the baseline has no such run"
            told.append(f"{names[arm.label]}: {unpaired}.")
    hardware = {run.device for arm in group.arms for run in arm.finished.values()}
    if len(hardware) > 1:
        listed = words.listing(sorted(hardware))
        told.append(f"The runs used different hardware ({listed}): images/s and memory do not compare.")
    return told


def _of_runs(arm: Arm) -> Iterator[str]:
    for run in arm.unfinished:
        yield f", seed {run.seed}: {_state(run)}."
    for run in arm.replaced:
        yield f", seed {run.seed}: {run.folder.name} was left out, because a later run has the same seed."


def _state(run: Run) -> str:
    if run.status == "failed":
        return f"failed: {run.error.rstrip('.')}" if run.error else "failed"
    if run.status in _UNREAD:
        return _UNREAD[run.status]
    states = {"stopped": "was stopped", "killed": "was killed", "running": "is still running"}
    return f"{states.get(run.status, 'has not finished')}, after {words.plural(len(run.epochs), 'epoch')}"
