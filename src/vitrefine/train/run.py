"""The folder of a run: what is in it, who may write there, and how it is read again.

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
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.train.job import Line, Result
from vitrefine.train.lock import is_locked

RUN, RECIPE, METRICS, RESULT = "run.json", "recipe.yaml", "metrics.jsonl", "result.json"
MODEL, CHECKPOINTS = "model.safetensors", "checkpoints"
_REMEDY = "move this run elsewhere, or train it again"


@dataclass(frozen=True)
class RunInfo:
    """A run as its folder tells it; see `about` for all of run.json."""

    folder: Path
    about: Mapping[str, Any]

    @property
    def spec(self) -> str:
        """Canonical, with the arguments that fit the model to the data."""
        return str(self.about["spec"])

    @property
    def base_spec(self) -> str:
        """As the user wrote it."""
        return str(self.about["base_spec"])

    @property
    def data(self) -> str:
        return str(self.about["data"])

    @property
    def seed(self) -> int:
        return int(self.about["seed"])

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` (it was asked to), `failed`, or `killed` (it ended without a word)."""
        status = str(self.about["status"])
        return "killed" if status == "running" and not is_locked(self.folder) else status

    @property
    def alone(self) -> bool:
        """Whether it had its device to itself, so that its speed is its own."""
        return bool(self.about.get("at_once", 1) == 1)

    @cached_property
    def result(self) -> Result | None:
        """What the run achieved; None if it is not finished."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        content = _read_json(path)
        if missing := {field.name for field in fields(Result)} - content.keys():
            raise UserError(f"{path} is damaged: it has no {min(missing)}; delete it and run again with --resume")
        return Result(**{field.name: content[field.name] for field in fields(Result)})

    @property
    def recipe_text(self) -> str:
        return (self.folder / RECIPE).read_text(encoding="utf-8")

    def metrics(self, kind: str | None = None) -> list[Line]:
        """The lines of metrics.jsonl, all or those of a kind (`step`, `epoch`)."""
        return [line for line in read_lines(self.folder / METRICS) if kind in (None, line.get("kind"))]


def read_run(folder: str | Path) -> RunInfo:
    """The run in a folder."""
    folder = Path(folder)
    path = folder / RUN
    if not path.is_file():
        raise UserError(f"{folder} holds no run: there is no {RUN} in it; name the folder of a run")
    about = _read_json(path)
    needed = ("spec", "base_spec", "data", "fingerprint", "recipe", "seed", "status")
    if missing := [name for name in needed if name not in about]:
        raise UserError(f"{path} is damaged: it has no {missing[0]}; {_REMEDY}")
    return RunInfo(folder, about)


def list_runs(root: str | Path) -> list[RunInfo]:
    """The runs in a folder and the folders in it, at any depth, by name."""
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; `vitrefine train` makes runs/ where it is called")
    return [read_run(path.parent) for path in sorted(root.rglob(RUN))]


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object; {_REMEDY}")
    return content
