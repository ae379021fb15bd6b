"""From run folders to raw results, so that no figure is typed."""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from vitrefine.claims.metrics import measure
from vitrefine.claims.raw import FOLDER, Raw, RawRun, merged, read_raw, write_raw
from vitrefine.claims.schema import canonical
from vitrefine.errors import UserError
from vitrefine.report.results import read
from vitrefine.train.run import RunInfo, list_runs

_PUBLIC = ("hf", "hf-hub", "hf_hub")  # kinds of data and weights whose text means the same everywhere


def add_runs(folders: Sequence[Path], docs: Path) -> list[Path]:
    """Put runs into the raw results of the documentation; the files that were written.

    Args:
        folders: Of runs, or folders that hold such.
        docs: The documentation.
    """
    runs = [run for folder in folders for run in list_runs(folder)]
    if not runs:
        raise UserError(f"there is no run in {', '.join(map(str, folders))}; vitrefine train makes them")
    for run in runs:
        if run.status == "running":
            raise UserError(f"{run.folder} is still running; add it when it has ended")
    try:
        (docs / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{docs / FOLDER} cannot be made a folder: {error.strerror}") from error
    fresh: dict[str, list[Raw]] = {}
    for run in runs:
        raw = _raw(run)
        fresh.setdefault(_file_name(raw), []).append(raw)
    written = []
    for name, raws in fresh.items():
        path = docs / FOLDER / name
        before = [read_raw(path)] if path.is_file() else []
        write_raw(path, _together([*before, *raws]))
        written.append(path)
    return written


def _together(raws: Sequence[Raw]) -> Raw:
    runs: list[RawRun] = []
    for raw in raws:
        runs = merged(runs, raw.runs)
    fullest = max(raws, key=lambda raw: len(raw.commands))  # diagnosed runs took more commands than others
    known = next((raw for raw in raws if raw.test_images), raws[0])
    return fullest.model_copy(update={"runs": runs, "test_images": known.test_images})


def _raw(info: RunInfo) -> Raw:
    run = read(info)
    measured = measure(info)
    spec, weights = canonical(info.base_spec), _portable(info.told.weights)
    folder = f"runs/{_slug(spec)}-s$seed"
    data = f"{_kind(info.data)}:PATH" if ":" in info.data and not _is_public(info.data) else info.data
    names = {"RUN": folder, "DATA": data, "RUN/diagnosis.html": f"{folder}/diagnosis.html"}
    commands = [_command(run.command, data, folder)]
    commands += [_joined(["vitrefine", *(names.get(word, word) for word in words)]) for words in measured.commands]
    result = info.result
    return Raw(
        spec=info.spec,
        base_spec=spec,
        data=_kind(info.data),
        fingerprint=run.fingerprint,
        test_images=result.test_images if result else None,
        recipe=Path(run.recipe_name).stem,
        weights=weights,
        settings=run.settings,
        params=run.params,
        macs=run.macs,
        commands=commands,
        runs=[
            RawRun(
                seed=info.seed,
                status=info.status,
                error=run.error,
                started=run.started,
                metrics=measured.values,
                correct=result.correct if result else "",
                seconds=result.seconds if result else None,
                at_once=info.told.at_once,
                hardware=run.device,
                versions=dict(run.versions),
            )
        ],
    )


def _file_name(raw: Raw) -> str:
    """Readable, and another one for whatever may not be averaged."""
    identity = json.dumps([raw.base_spec, *raw.comparable], ensure_ascii=False)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"{_slug(raw.base_spec)}-{_slug(raw.data)}-{_slug(raw.recipe)}-{digest}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")


def _kind(data: str) -> str:
    """`cifar100` of `cifar100:PATH`: the place differs from machine to machine, and the fingerprint tells the rest."""
    return data if _is_public(data) else data.partition(":")[0]


def _is_public(text: str) -> bool:
    return text.partition(":")[0] in _PUBLIC


def _portable(weights: str | None) -> str | None:
    """Weights without the folder that they lie in."""
    return weights if weights is None or _is_public(weights) else Path(weights).name


def _command(command: str, data: str, folder: str) -> str:
    """A run's command without what is of one machine: where data and weights lie, and where runs go."""
    words = shlex.split(command)
    told = {"--data": data, "--seed": "$seed", "--out": folder}
    for at, word in enumerate(words[:-1]):
        if word in told:
            words[at + 1] = told[word]
        elif word == "--weights":
            words[at + 1] = str(_portable(words[at + 1]))
        elif word == "--recipe":
            words[at + 1] = Path(words[at + 1]).name
    return _joined(words)


def _joined(words: Sequence[str]) -> str:
    """For a shell; $seed is left for it to fill in."""
    return " ".join(word if "$seed" in word else shlex.quote(word) for word in words)
