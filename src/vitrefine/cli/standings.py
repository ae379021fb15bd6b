"""A comparison in the terminal: the figures of the page, as a table."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrefine.cli.console import wide_console

if TYPE_CHECKING:
    from vitrefine.report.collect import Collection
    from vitrefine.report.findings import Row
    from vitrefine.report.results import Group

_COLOURS = {1: "green", -1: "red"}


def present(collection: "Collection", page: Path) -> None:
    """Print the standings and what is not in them, and write the page even if nobody reads that any more."""
    from vitrefine.report.page import write_page

    try:
        for sentence in collection.left_out:
            print(f"left out: {sentence}", file=sys.stderr)
        print_standings(wide_console(), collection.groups)
    finally:
        write_page(collection, page)


def print_standings(console: Console, groups: "list[Group]") -> None:
    """Print for each group of runs the answer, the figures, and what went wrong."""
    from vitrefine.report import findings, notes
    from vitrefine.report.problems import problems

    whole = not console.is_terminal  # a log file has no width, and a terminal would break words
    for group in groups:
        rows = findings.rows(group)
        console.print()
        if len(groups) > 1:
            console.print(Text(notes.summary(group)))
        console.print(Text(findings.headline(group, rows), style="bold"), soft_wrap=whole)
        console.print(_table(rows, findings.short_names(group)))
        if caution := notes.many(rows):
            console.print(Text(caution, style="dim"), soft_wrap=whole)
        for problem in problems(group):
            console.print(Text(problem, style="yellow"), soft_wrap=whole)


def _table(rows: "list[Row]", names: dict[str, str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("spec", overflow="fold")
    compared = len(rows) > 1
    for column in ("accuracy %", *(["difference"] if compared else []), "parameters", "MACs", "images/s", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(names[row.label]), *_cells(row, compared))
    return table


def _cells(row: "Row", compared: bool) -> list[Text]:
    """Figures over what belongs to them, so that the table fits a terminal of 80 columns."""
    from vitrefine.report.cells import cells

    shown = [Text.assemble(figure, "\n", (below, "dim")) for figure, below in cells(row, compared)]
    if compared and row.difference and row.difference.sign:
        shown[1].stylize(_COLOURS[row.difference.sign])
    return shown
