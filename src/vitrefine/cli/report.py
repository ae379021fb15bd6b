"""`vitrefine report`: the page of runs that are there already."""

from pathlib import Path
from typing import Annotated

import typer

from vitrefine.cli.options import check_out


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or folders that hold such.")],
    out: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="The page; report.html in the folder if left out.")
    ] = None,
) -> None:
    """Make one self-contained HTML page of runs: figures with intervals, curves, attention, and how to rerun them.

    The spec of the first run is what the others are compared with.

    Runs with other data or another recipe are shown in sections of their own, and not compared. A run that is damaged
    is left out, which is said here and on the page.

    \b
    Examples:
      vitrefine report runs/compare-vit_tiny_patch16_224-digits-1f0c3a
      vitrefine report runs/vit_tiny_patch16_224-digits-s0 runs/vit_tiny_patch16_224-cb-digits-s0
      vitrefine report runs --out all.html
    """
    from vitrefine.cli.standings import present
    from vitrefine.report.collect import collect
    from vitrefine.report.page import PAGE

    page = out or (runs[0] / PAGE if len(runs) == 1 and runs[0].is_dir() else Path(PAGE))
    check_out(page)
    present(collect(runs), page)
    typer.echo(f"\nthe page is {page}")
