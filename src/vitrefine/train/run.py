"""The folder of a run: what is in it, and how it is read again, for every command that asks.

run.json            what was asked, of what version on what device, and how far it got
recipe.yaml         the whole recipe
metrics.jsonl       a line at every log point and epoch
checkpoints/        the last few
model.safetensors   the trained model
result.json         what it achieves
lock                held by the process that writes here
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.train.job import Line, Result
from vitrefine.train.lock import is_locked
from vitrefine.train.saved import read_saved

RUN, RECIPE, METRICS, RESULT = "run.json", "recipe.yaml", "metrics.jsonl", "result.json"
MODEL, CHECKPOINTS = "model.safetensors", "checkpoints"


class _Saved(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class About(_Saved):
    """run.json, as far as other commands ask for it."""

    spec: str
    base_spec: str
    data: str
    fingerprint: str
    recipe: str
    seed: int
    status: str
    weights: str | None = None
    error: str = ""
    params: int | None = None
    macs: int | None = None
    device: str = ""
    at_once: int = 1
    versions: dict[str, str] = {}
    command: str = ""
    started: str | None = None


class Epoch(_Saved):
    """A line of an epoch in metrics.jsonl."""

    epoch: int
    train_loss: float | None = None
    test_loss: float | None = None
    top1: float | None = None


_ABOUT, _RESULT = TypeAdapter(About), TypeAdapter(Result)


@dataclass(frozen=True)
class RunInfo:
    """A run as its folder tells it."""

    folder: Path
    told: About

    @property
    def about(self) -> dict[str, Any]:
        """All of run.json."""
        return self.told.model_dump(exclude_unset=True)

    @property
    def spec(self) -> str:
        """Canonical, with the arguments that fit the model to the data."""
        return self.told.spec

    @property
    def base_spec(self) -> str:
        """As the user wrote it."""
        return self.told.base_spec

    @property
    def data(self) -> str:
        return self.told.data

    @property
    def seed(self) -> int:
        return self.told.seed

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` (it was asked to), `failed`, or `killed` (it ended without a word)."""
        status = self.told.status
        return "killed" if status == "running" and not is_locked(self.folder) else status

    @property
    def alone(self) -> bool:
        """Whether it had its device to itself, so that its speed is its own."""
        return self.told.at_once == 1

    @cached_property
    def result(self) -> Result | None:
        """What the run achieved; None if it is not finished."""
        path, remedy = self.folder / RESULT, "delete it and run again with --resume"
        if not path.is_file():
            return None
        result = read_saved(path, _RESULT, remedy)
        if not _holds(result.correct, result.test_images):
            wrong = f'its "correct" does not hold {result.test_images} images'
            raise UserError(f"{path} is damaged: {wrong}; {remedy}")
        return result

    @property
    def recipe_text(self) -> str:
        path = self.folder / RECIPE
        try:
            text = path.read_text(encoding="utf-8")
            readable = isinstance(yaml.safe_load(text), dict)
        except (OSError, ValueError, yaml.YAMLError):
            readable = False
        if not readable:
            raise UserError(f"{path} cannot be read; restore it, or train this run again")
        return text

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs in metrics.jsonl; as it is a log, a line that is none as training writes them is left out."""
        return [epoch for line in self.metrics("epoch") if (epoch := _epoch(line))]

    def metrics(self, kind: str | None = None) -> list[Line]:
        """The lines of metrics.jsonl, all or those of a kind (`step`, `epoch`)."""
        return [line for line in read_lines(self.folder / METRICS) if kind in (None, line.get("kind"))]


def read_run(folder: str | Path) -> RunInfo:
    """The run in a folder."""
    path = Path(folder) / RUN
    if not path.is_file():
        raise UserError(f"{path.parent} holds no run: there is no {RUN} in it; name the folder of a run")
    return RunInfo(path.parent, read_saved(path, _ABOUT, "move this run elsewhere, or train it again"))


def find_runs(root: str | Path) -> list[Path]:
    """The folders of the runs in a folder and the folders in it, at any depth, by name."""
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; `vitrefine train` makes runs/ where it is called")
    return [path.parent for path in sorted(root.rglob(RUN))]


def list_runs(root: str | Path) -> list[RunInfo]:
    """The runs in a folder, none of which may be damaged."""
    return [read_run(folder) for folder in find_runs(root)]


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Replace run.json."""
    replace_file(folder / RUN, (json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode())


def write_result(folder: Path, result: Result) -> None:
    """Write result.json."""
    replace_file(folder / RESULT, (json.dumps(asdict(result), indent=2) + "\n").encode())


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file of JSON lines; one that a kill cut short, or that is no object, is left out."""
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def _epoch(line: Line) -> Epoch | None:
    try:
        return Epoch.model_validate(line)
    except ValidationError:
        return None


def _holds(bits: str, images: int) -> bool:
    """Whether there is a bit for each image."""
    try:
        return images > 0 and len(bytes.fromhex(bits)) == (images + 7) // 8
    except ValueError:
        return False
