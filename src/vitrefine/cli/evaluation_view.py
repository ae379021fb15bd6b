"""How an evaluation goes, while it goes: a live bar on a terminal, a line for each part in a log file."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class EvaluationView:
    """A `Watcher` for people.

    Args:
        console: Where to; standard error if None, for standard output is for results.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        name = TextColumn("{task.description}", markup=False)
        self._progress = Progress(name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self.console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "EvaluationView":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def __call__(self, what: str, done: int, of: int) -> None:
        if not self.console.is_terminal:
            if what not in self._tasks:
                self._tasks[what] = TaskID(0)
                begun = f" (from image {done:,} on)" if done else ""
                self.console.print(Text(f"{what}: {of:,}{begun}"), soft_wrap=True)
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=of)
        self._progress.update(self._tasks[what], completed=done)
