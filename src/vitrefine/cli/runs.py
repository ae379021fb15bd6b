"""`vitrefine runs`: the runs in a folder, and what came out of them."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrefine.cli.console import wide_console
from vitrefine.errors import UserError

_WIDEST = 100  # columns of the table; more would part figures from what they belong to


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look, at any depth.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """The runs in a folder: how far they are, and how good.

    \b
    Examples:
      vitrefine runs
      vitrefine runs runs/ablation
      vitrefine runs --json
    """
    from vitrefine.train.run import find_runs

    found = [_row(each) for each in find_runs(folder)]
    if as_json:
        typer.echo(json.dumps(found))
    elif found:
        _print(found)
    else:
        typer.echo(f"no runs in {folder}; `vitrefine train` makes them")


def _row(folder: Path) -> dict[str, Any]:
    """What a run's files tell; if they are damaged, that they are: the other runs are to be seen all the same."""
    from vitrefine.train.run import read_run

    try:
        run = read_run(folder)
        result, epochs = dataclasses.asdict(run.result) if run.result else {}, run.epochs
    except UserError as error:
        return {"folder": str(folder), "status": "damaged", "error": str(error)}
    result.pop("correct", None)  # a bit for each test image is for programs that read the file
    tested = next((epoch for epoch in reversed(epochs) if epoch.top1 is not None), None)
    row = {"folder": str(folder), **run.about, "status": run.status, "epochs_done": len(epochs)}
    row |= {"top1": tested and tested.top1, "test_loss": tested and tested.test_loss, "result": result or None}
    return row


def _print(found: list[dict[str, Any]]) -> None:
    """A table for each folder that holds runs, so that lines need not repeat it."""
    console = wide_console()

    def parent(row: dict[str, Any]) -> Path:
        return Path(row["folder"]).parent

    for place, group in itertools.groupby(sorted(found, key=parent), key=parent):
        rows = list(group)
        data = {row["data"] for row in rows if "data" in row}
        told = f" on {data.pop()}" if len(data) == 1 else ""
        console.print(Text.assemble((str(place), "bold"), told), soft_wrap=True)
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0), expand=True)
        table.add_column("run", overflow="fold", ratio=1)
        for column in ("seed", "params", "epochs", "top-1 %", "images/s"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row in rows:
            table.add_row(_name(row, with_data=not told), *_cells(row), row["status"])
        console.print(table, width=min(console.width, _WIDEST))


def _name(row: dict[str, Any], with_data: bool) -> Text:
    below = [(f"\n{row['base_spec']}", "dim")] if "base_spec" in row else []
    below += [(f" on {row['data']}", "dim")] if "data" in row and with_data else []
    wrong = [(f"\n{row['error']}", "yellow")] if "error" in row else []
    return Text.assemble(Path(row["folder"]).name or row["folder"], *below, *wrong)


def _cells(row: dict[str, Any]) -> list[str]:
    """Seed, parameters, epochs, accuracy, and speed, where it had the device to itself."""
    speed = (row.get("result") or {}).get("images_per_s") if row.get("at_once", 1) == 1 else None
    figures = (
        (row.get("seed"), "{:d}", 1),
        (row.get("params"), "{:.2f} M", 1e6),
        (row.get("epochs_done"), "{:d}", 1),
        (row.get("top1"), "{:.2f}", 1),
        (speed, "{:,.0f}", 1),
    )
    return ["–" if value is None else form.format(value / unit if unit > 1 else value) for value, form, unit in figures]
