"""`vitrefine runs`: the runs in a folder, and what came out of them."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from vitrefine.train.run import RunInfo


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
    from vitrefine.train.run import list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([_row(run) for run in found]))
    elif found:
        _print(found)
    else:
        typer.echo(f"no runs in {folder}; `vitrefine train` makes them")


def _row(run: "RunInfo") -> dict[str, Any]:
    epochs = run.metrics("epoch")
    last = next((line for line in reversed(epochs) if "top1" in line), {})
    result = dataclasses.asdict(run.result) if run.result else {}
    result.pop("correct", None)  # a bit for each test image is for programs that read the file
    row = {"folder": str(run.folder), **run.about, "status": run.status, "epochs_done": len(epochs)}
    return row | {"top1": last.get("top1"), "test_loss": last.get("test_loss"), "result": result or None}


def _print(found: "list[RunInfo]") -> None:
    table = Table("run", "model", "data", box=None, header_style="bold", pad_edge=False)
    for column in ("seed", "parameters", "epochs", "top-1 %", "images/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for run in found:
        row = _row(run)
        speed = row["result"]["images_per_s"] if row["result"] else None
        table.add_row(
            Text(row["folder"]),
            Text(run.base_spec),
            Text(run.data),
            str(run.seed),
            f"{row['params'] / 1e6:.2f} M" if "params" in row else "–",
            str(row["epochs_done"]),
            "–" if row["top1"] is None else f"{row['top1']:.2f}",
            "–" if speed is None else f"{speed:,.0f}",
            Text(row["status"] + (f": {row['error']}" if "error" in row else "")),
        )
    Console().print(table)
