"""How a comparison goes, while it goes: a bar for all of it, one for the run in hand, a line for each that is done."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from vitrefine.train.job import Line, Result, Start

_LINES = 10  # of a run in a log file, at most


class ComparisonView:
    """A `Watcher` of many runs, one after the other.

    Args:
        names: What to call each run, by its folder.
        done: How many of them are finished already.
        console: Where to; standard error if None, for standard output is for results.
    """

    def __init__(self, names: Mapping[Path, str], done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.names, self.done = names, done
        columns = [TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("name", "figures")]
        self._progress = Progress(columns[0], BarColumn(), TimeRemainingColumn(), columns[1], console=self.console)
        self._all: TaskID | None = None
        self._one: TaskID | None = None
        self._start: Start | None = None
        self._figures: dict[str, str] = {}
        self._said: set[str] = set()

    def __enter__(self) -> "ComparisonView":
        if self.console.is_terminal:
            self._progress.start()
        if self.done:
            self.on_note(f"{self.done} of {len(self.names)} runs are finished already")
        return self

    def __exit__(self, *failure: object) -> None:
        for task in self._progress.task_ids:  # what they showed stands in the lines above
            self._progress.update(task, visible=False)
        if self.console.is_terminal:
            self._progress.stop()

    def on_start(self, start: "Start") -> None:
        self._start, self._figures = start, {}
        if self._all is None:  # the same data and recipe: all runs are equally long
            fields: dict[str, Any] = {"name": "", "figures": ""}
            self._all = self._progress.add_task("", total=start.steps * len(self.names), **fields)
            self._one = self._progress.add_task("", total=start.steps, **fields)
        assert self._one is not None
        self._progress.update(self._all, name=f"run {self.done + 1} of {len(self.names)}")
        self._progress.reset(self._one, completed=start.step, name=self._name, figures="")
        self._advance(start.step)
        if not self.console.is_terminal:
            self.on_note(f"run {self.done + 1} of {len(self.names)}: {self._name}, on {start.device}")

    def on_step(self, line: "Line") -> None:
        self._figures |= {"loss": f"loss {line['loss']:.3f}", "speed": f"{line['images_per_s']:,.0f} images/s"}
        self._advance(line["step"])

    def on_epoch(self, line: "Line") -> None:
        assert self._start is not None
        epochs = self._start.epochs
        self._figures |= {"epoch": f"epoch {line['epoch']}/{epochs}"}
        if "top1" in line:
            self._figures |= {"accuracy": f"test {line['top1']:.2f} %"}
        self._figures |= {"loss": f"loss {line['train_loss']:.3f}", "speed": f"{line['images_per_s']:,.0f} images/s"}
        self._advance(line["step"])
        if not self.console.is_terminal and line["epoch"] % (1 + epochs // _LINES) == 0:
            self.on_note(f"{self._name}: {self._shown()}")

    def on_note(self, sentence: str) -> None:
        if sentence in self._said:  # runs are alike, and so are their notes
            return
        self._said.add(sentence)
        # Without wrapping: a log file has no width, and a terminal wraps by itself.
        self.console.print(Text(sentence), soft_wrap=True)

    def on_end(self, result: "Result") -> None:
        figures = f"{result.top1:.2f} %, {result.images_per_s:,.0f} images/s, {result.seconds:.0f} s"
        self.on_note(f"{self._name}: {figures}")
        self.passed()

    def passed(self) -> None:
        """A run is done with, whether or not it came to its end."""
        self.done += 1
        if self._start:
            self._advance(0)

    @property
    def _name(self) -> str:
        return self.names[self._start.folder] if self._start else ""

    def _shown(self) -> str:
        return "  ".join(
            self._figures[name] for name in ("epoch", "loss", "accuracy", "speed") if name in self._figures
        )

    def _advance(self, step: int) -> None:
        if self._start and self._all is not None and self._one is not None:
            self._progress.update(self._one, completed=step, figures=self._shown())
            self._progress.update(self._all, completed=self.done * self._start.steps + step)
