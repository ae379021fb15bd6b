"""How a run goes, while it goes: a live bar on a terminal, plain lines in a log file."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from vitrefine.cli.figures import Figures

if TYPE_CHECKING:
    from vitrefine.train.job import Line, Result, Start


class TrainingView:
    """A `Watcher` for people; several runs one after the other may share one, each has its bar.

    Args:
        console: Where to; standard error if None, for standard output is for results.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal
        columns = ("{task.description}", "epoch {task.fields[epoch]}", "{task.fields[figures]}")
        name, epoch, figures = (TextColumn(column, markup=False) for column in columns)
        self._progress = Progress(name, BarColumn(), epoch, figures, TimeRemainingColumn(), console=self.console)
        self._task = TaskID(0)
        self._figures = Figures()
        self._start: Start | None = None

    def __enter__(self) -> "TrainingView":
        if self.live:
            self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.live:
            self._progress.stop()

    def on_start(self, start: "Start") -> None:
        self._start, self._figures = start, Figures()
        length = f"{start.epochs} {'epoch' if start.epochs == 1 else 'epochs'} of {start.updates_per_epoch} updates"
        self._say(f"{start.spec} on {start.data}: {length}, {_where(start)}; writing to {start.folder}")
        if self.live:
            fields: dict[str, Any] = {"epoch": f"1/{start.epochs}", "figures": ""}
            self._task = self._progress.add_task(start.folder.name, total=start.steps, completed=start.step, **fields)

    def on_step(self, line: "Line") -> None:
        self._advance(line)
        if not self.live:
            self._say(f"step {line['step']}/{self._steps}  {self._figures}  lr {line['lr']:.2e}")

    def on_epoch(self, line: "Line") -> None:
        self._advance(line)
        if not self.live:
            self._say(f"epoch {line['epoch']}/{self._epochs}  {self._figures}  {line['seconds']:.1f} s")
        if "skipped" in line:
            self._say("; ".join(f"{count} times skipped: {reason}" for reason, count in line["skipped"].items()))

    def on_note(self, sentence: str) -> None:
        self._say(sentence)

    def on_end(self, result: "Result") -> None:
        if self.live:
            self._progress.update(self._task, completed=self._steps)

    @property
    def _steps(self) -> int:
        return self._start.steps if self._start else 0

    @property
    def _epochs(self) -> int:
        return self._start.epochs if self._start else 0

    def _advance(self, line: "Line") -> None:
        self._figures.learn(line)
        if self.live:
            fields: dict[str, Any] = {"epoch": f"{line['epoch']}/{self._epochs}", "figures": str(self._figures)}
            self._progress.update(self._task, completed=line["step"], **fields)

    def _say(self, sentence: str) -> None:
        # Without wrapping: a log file has no width, and a terminal wraps by itself.
        self.console.print(Text(sentence), soft_wrap=True)


def _where(start: "Start") -> str:
    many = f" in each of {start.processes} processes" if start.processes > 1 else ""
    return f"{start.params / 1e6:.2f} M parameters, {start.device} in {start.precision}{many}"
