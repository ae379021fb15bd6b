"""What an evaluation found: an object that prints itself, and JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitrefine.evaluate.accuracy import Accuracy
from vitrefine.evaluate.rfc import Calibration
from vitrefine.evaluate.robustness import Outcome
from vitrefine.evaluate.speed import Speed
from vitrefine.files import replace_file

FILE = "evaluation.json"  # in the folder of a run: a list of evaluations
PARTS = ("accuracy", "robustness", "rfc", "speed")


@dataclass(frozen=True)
class Evaluation:
    """A model's figures on a data set, as far as they were asked for."""

    model: str
    weights: str
    """Hash of the model and its weights."""
    data: str
    fingerprint: str
    images: int
    settings: Mapping[str, Any]
    """What else decides the figures: size, crop ratio, mean and deviation, limit, seed, precision."""
    device: str
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    accuracy: Accuracy | None = None
    robustness: list[Outcome] | None = None
    rfc: Calibration | None = None
    speed: Speed | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; parts that were not asked for are left out."""
        found = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in found.items() if name not in PARTS or value is not None}

    def write(self, path: str | Path) -> None:
        """Write one JSON object."""
        replace_file(Path(path), _text(self.as_dict()))

    def __str__(self) -> str:
        from vitrefine.evaluate.show import show

        return show(self)


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluations in the folder of a run; none where their file is missing or damaged."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def add_to_run(folder: Path, evaluation: Evaluation) -> None:
    """Put an evaluation beside a run's others; parts of one that was made in the same way are kept or replaced."""
    fresh = evaluation.as_dict()
    same = ("model", "weights", "data", "fingerprint", "images", "settings")
    others = []
    for old in read_evaluations(folder):
        if all(old.get(name) == fresh[name] for name in same):
            fresh = {**old, **fresh}
        else:
            others.append(old)
    replace_file(folder / FILE, _text([*others, fresh]))


def _text(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
