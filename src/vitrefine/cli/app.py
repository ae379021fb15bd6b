"""The commands of `vitrefine`, gathered. PyTorch and timm are imported inside the commands: help must come at once."""

from typing import Annotated

import typer

from vitrefine import __version__
from vitrefine.cli.claims import claims
from vitrefine.cli.compare import compare
from vitrefine.cli.convert import convert
from vitrefine.cli.diagnose import diagnose
from vitrefine.cli.evaluate import evaluate
from vitrefine.cli.info import info
from vitrefine.cli.models import models
from vitrefine.cli.report import report
from vitrefine.cli.runs import runs
from vitrefine.cli.train import train
from vitrefine.cli.zoo import zoo

app = typer.Typer(
    help="Take any vision transformer, change how it attends, and know what that did.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(models)
app.command()(info)
app.command()(convert)
app.command()(zoo)
app.command()(train)
app.command()(runs)
app.command()(evaluate)
app.command()(compare)
app.command()(diagnose)
app.command()(report)
app.command()(claims)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"vitrefine {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...
