"""`vitrefine claims`: the ledger of what the papers say and what was found here."""

from pathlib import Path
from typing import Annotated

import typer

from vitrefine.errors import UserError

Paths = list[Path]


def claims(
    runs: Annotated[
        Paths | None, typer.Argument(metavar="[RUN]", help="With --add: folders of runs, or folders that hold such.")
    ] = None,
    docs: Annotated[
        Path, typer.Option(metavar="FOLDER", help="With claims/*.yaml and results/*.json, and for claims.md.")
    ] = Path("docs"),
    add: Annotated[bool, typer.Option("--add", help="Put runs into the raw results first.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if the page is not current.")
    ] = False,
) -> None:
    """Make the page of claims: what the papers print, what was measured, and whether it was reproduced.

    Verdicts are computed from the 95 % interval of differences paired by seed. Runs that failed are added as failed.

    \b
    Examples:
      vitrefine claims
      vitrefine claims --check
      vitrefine claims --add runs/compare-vit_tiny_patch16_224-cifar100-1f0c3a
    """
    if add and check:
        raise UserError("--add writes and --check does not; give one of them")
    if add and not runs:
        raise UserError("--add needs runs; name their folders, or a folder that holds them")
    if runs and not add:
        raise UserError(f"what is to be done with {runs[0]}? To put it into the raw results, say --add")
    if not docs.is_dir():
        raise UserError(f"there is no folder {docs}; say with --docs where the documentation is")
    from vitrefine.claims.add import add_runs
    from vitrefine.claims.ledger import read_ledgers
    from vitrefine.claims.page import counts, is_current, write_page
    from vitrefine.claims.raw import read_raws
    from vitrefine.claims.verdict import assess_all
    from vitrefine.report.words import plural

    if check:
        if not is_current(docs):
            typer.echo(f"{docs / 'claims.md'} is not current; make it anew with vitrefine claims --docs {docs}")
            raise typer.Exit(1)
        typer.echo(f"{docs / 'claims.md'} is current")
        return
    ledgers = read_ledgers(docs)  # a mistake in them is told before anything is written
    for path in add_runs(runs or [], docs) if add else []:
        typer.echo(f"wrote {path}")
    raws = read_raws(docs)
    for ledger in ledgers:
        found = counts(ledger, assess_all(ledger, raws))
        repeats = len(ledger.claims) - sum(found.values())
        shown = ", ".join([*(f"{many} {verdict}" for verdict, many in found.items()), f"{repeats} repeat others"])
        typer.echo(f"{ledger.title}: {plural(len(ledger.claims), 'row')}: {shown}")
    typer.echo(f"the page is {write_page(docs)}")
