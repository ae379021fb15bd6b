"""How a comparison goes, while it goes: a bar for all of it, one for each run in hand, a line for each that is done."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from vitrefine.cli.figures import Figures

if TYPE_CHECKING:
    from vitrefine.train.job import Line, Result, Start

_LINES = 10  # of a run in a log file, at most


class ComparisonView:
    """Shows many runs, one after the other or some at once.

    Args:
        names: What to call each run, by its folder.
        done: How many of them are finished already.
        console: Where to; standard error if None, for standard output is for results.
    """

    def __init__(self, names: Mapping[Path, str], done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.names, self.done, self.begun = names, done, done
        columns = [TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("name", "figures")]
        self.progress = Progress(columns[0], BarColumn(), TimeRemainingColumn(), columns[1], console=self.console)
        self._all: TaskID | None = None
        self._runs: dict[Path, RunView] = {}
        self._said: set[str] = set()

    def __enter__(self) -> "ComparisonView":
        if self.console.is_terminal:
            self.progress.start()
        if self.done:
            self.on_note(f"{self.done} of {len(self.names)} runs are finished already")
        return self

    def __exit__(self, *failure: object) -> None:
        for task in self.progress.task_ids:  # what they showed stands in the lines above
            self.progress.update(task, visible=False)
        if self.console.is_terminal:
            self.progress.stop()

    def of(self, folder: Path) -> "RunView":
        """The watcher of one run."""
        return self._runs.setdefault(folder, RunView(self, self.names[folder]))

    def failed(self, folder: Path, why: str) -> None:
        """A run came to no end."""
        run = self.of(folder)
        self.on_note(f"{run.name} failed: {why}")
        run.leave()

    def on_note(self, sentence: str) -> None:
        if sentence in self._said:  # runs are alike, and so are their notes
            return
        self._said.add(sentence)
        # Without wrapping: a log file has no width, and a terminal wraps by itself.
        self.console.print(Text(sentence), soft_wrap=True)

    def advance(self, steps: int) -> None:
        """Show how far all of it is.

        Args:
            steps: Of a run; they have the same data and recipe, so all are equally long.
        """
        name = f"{self.done} of {len(self.names)} runs done"
        if self._all is None:
            self._all = self.progress.add_task("", total=steps * len(self.names), name=name, figures="")
        now = self.done * steps + sum(run.step for run in self._runs.values())
        self.progress.update(self._all, completed=now, name=name)


class RunView:
    """A `Watcher` of one run among others."""

    def __init__(self, view: ComparisonView, name: str) -> None:
        self.name, self.step = name, 0
        self._view = view
        self._start: Start | None = None
        self._task: TaskID | None = None
        self._figures, self._epoch = Figures(), ""

    def on_start(self, start: "Start") -> None:
        view, self._start = self._view, start
        view.begun += 1
        self._advance(start.step)
        if not view.console.is_terminal:
            view.on_note(f"run {view.begun} of {len(view.names)}: {self.name}, on {start.device}")

    def on_step(self, line: "Line") -> None:
        self._figures.learn(line)
        self._advance(line["step"])

    def on_epoch(self, line: "Line") -> None:
        assert self._start is not None
        epochs = self._start.epochs
        self._epoch = f"epoch {line['epoch']}/{epochs}  "
        self._figures.learn(line)
        self._advance(line["step"])
        if not self._view.console.is_terminal and line["epoch"] % (1 + epochs // _LINES) == 0:
            self._view.on_note(f"{self.name}: {self._epoch}{self._figures}")

    def on_note(self, sentence: str) -> None:
        self._view.on_note(sentence)

    def on_end(self, result: "Result") -> None:
        figures = f"{result.top1:.2f} %, {result.images_per_s:,.0f} images/s, {result.seconds:.0f} s"
        self._view.on_note(f"{self.name}: {figures}")
        self.leave()

    def leave(self) -> None:
        """The run is done with, whether or not it came to its end."""
        self.step = 0
        self._view.done += 1
        if self._task is not None:
            self._view.progress.update(self._task, visible=False)
        if self._start:
            self._view.advance(self._start.steps)

    def _advance(self, step: int) -> None:
        assert self._start is not None
        self.step = step
        self._view.advance(self._start.steps)
        if self._task is None:
            self._task = self._view.progress.add_task("", total=self._start.steps, name=self.name, figures="")
        self._view.progress.update(self._task, completed=step, figures=f"{self._epoch}{self._figures}")
