"""What is asked of a training run, what comes out of it, and who watches."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vitrefine.errors import UserError
from vitrefine.train.recipe import Recipe

Line = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        spec: The model, as the user wrote it.
        data: The data set's text, as `open_data` takes it.
        recipe: Overrides included.
        recipe_name: The name or file it was loaded from.
        folder: Where everything is written; made if it is not there.
        seed: Of weights, order, augmentation and dropout; from 0 to 2⁶³ − 1.
        resume: Continue what the folder holds, or start if it holds nothing.
        overrides: The overrides as they were given, for the command that repeats the run.
        weights: Where to start from: `pretrained`, a file or run folder, `hf-hub:owner/name`; from scratch if None.
        track: Trackers besides the JSON lines: tensorboard, wandb, trackio.
        at_once: Runs that share the device, this one among them; the speed of one alone is not known if there are more.
    """

    spec: str
    data: str
    recipe: Recipe
    recipe_name: str
    folder: Path
    seed: int = 0
    resume: bool = False
    overrides: tuple[str, ...] = ()
    weights: str | None = None
    track: tuple[str, ...] = ()
    at_once: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"the seed is {self.seed}; take one from 0 to 2**63 - 1")

    def command(self) -> str:
        """What to type to have it again."""
        words = ["vitrefine", "train", self.spec, "--data", self.data, "--recipe", self.recipe_name]
        words += [word for text in self.overrides for word in ("--set", text)]
        words += ["--weights", self.weights] if self.weights else []
        return shlex.join([*words, "--seed", str(self.seed), "--out", str(self.folder)])


@dataclass(frozen=True)
class Result:
    """What a finished run achieved; accuracies are per cent."""

    top1: float
    top5: float
    test_loss: float
    test_images: int
    images_per_s: float  # in training, data included
    peak_memory_mib: float | None
    seconds: float  # of training and testing, over all restarts
    epochs: int
    params: int
    macs: int | None
    correct: str  # a bit for each test image, in hexadecimal digits, the first image first


@dataclass(frozen=True)
class Start:
    """What a run is about to do."""

    spec: str
    data: str
    folder: Path
    device: str
    processes: int
    precision: str
    params: int
    macs: int | None
    epochs: int
    updates_per_epoch: int
    step: int  # updates done already, when it continues

    @property
    def steps(self) -> int:
        """Updates in all."""
        return self.epochs * self.updates_per_epoch


class Watcher(Protocol):
    """Is told how a run goes, in the main process."""

    def on_start(self, start: Start) -> None: ...

    def on_step(self, line: Line) -> None:
        """A line of the log: step, epoch, loss, lr, images_per_s."""

    def on_epoch(self, line: Line) -> None:
        """An epoch is done: epoch, train_loss, images_per_s, seconds, memory_mib; if tested, test_loss, top1, top5."""

    def on_note(self, sentence: str) -> None:
        """Something that a person should know."""

    def on_end(self, result: Result) -> None: ...


class Silent:
    """Watches without a word."""

    def on_start(self, start: Start) -> None: ...

    def on_step(self, line: Line) -> None: ...

    def on_epoch(self, line: Line) -> None: ...

    def on_note(self, sentence: str) -> None: ...

    def on_end(self, result: Result) -> None: ...


silent = Silent()


class Stopped(SystemExit):
    """What was asked to stop (SIGTERM or Ctrl-C) left a checkpoint; unless caught, the process ends with 0.

    Args:
        step: The last of the run, if it was one run.
    """

    def __init__(self, step: int | None = None) -> None:
        super().__init__(0)
        self.step = step
