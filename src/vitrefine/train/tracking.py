"""The log of a run: JSON lines always, and other trackers through Accelerate where they are asked for."""

import importlib.util
import json
import os
from pathlib import Path

from accelerate import Accelerator

from vitrefine.errors import UserError, check_choice
from vitrefine.files import replace_file
from vitrefine.train.job import Line
from vitrefine.train.run import read_lines

TRACKERS = ("tensorboard", "wandb", "trackio")


class MetricsFile:
    """Lines that are on their way to the disk when `add` returns, and on it after `sync`.

    Args:
        path: The file; made when the first line comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: Line) -> None:
        """Append a line; in one write, so that a kill leaves it out or whole."""
        text = json.dumps(line) + "\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); continue with --resume") from error

    def sync(self) -> None:
        """Wait for the disk."""
        if self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())

    def cut(self, step: int, epochs: int) -> None:
        """Drop what came after a checkpoint, and will come again.

        Args:
            step: Updates done at the checkpoint.
            epochs: Epochs finished at the checkpoint.
        """
        lines = [line for line in read_lines(self.path) if _is_before(line, step, epochs)]
        if self.path.exists():
            replace_file(self.path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _is_before(line: Line, step: int, epochs: int) -> bool:
    # An epoch's line comes after its last step's, so at that step it need not have been written.
    return line["epoch"] <= epochs if line.get("kind") == "epoch" else line.get("step", 0) <= step


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse a tracker that is unknown or not installed."""
    for name in names:
        check_choice("tracker", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed; pip install {name}, or leave out --track {name}")


def start_trackers(accelerator: Accelerator, folder: Path, about: Line) -> None:
    """Open the accelerator's trackers for a run.

    Args:
        accelerator: Made with `log_with` and `project_dir`.
        folder: The run's; its name is the name that W&B and trackio show.
        about: run.json.
    """
    settings = {key: value for key, value in about.items() if isinstance(value, str | int | float)}
    names = {"wandb": {"name": folder.name, "dir": str(folder)}, "trackio": {"name": folder.name}}
    accelerator.init_trackers("vitrefine", config=settings, init_kwargs=names)


def track(accelerator: Accelerator, line: Line) -> None:
    """Hand a line to the trackers, as `train/loss`, `test/top1` and so on."""
    if accelerator.trackers:
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        accelerator.log({f"{line['kind']}/{key}": value for key, value in numbers.items()}, step=line["step"])
