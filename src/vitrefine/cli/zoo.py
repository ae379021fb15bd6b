"""`vitrefine zoo`: which modification works on which family of models, as measured."""

import dataclasses
import difflib
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitrefine.cli.console import wide_console
from vitrefine.errors import UserError

if TYPE_CHECKING:
    from vitrefine.surgery.zoo import Row

_HINTS = 3  # at most, where a name is wrong
# Headers that let the whole matrix fit a terminal of eighty columns.
SHORT = {
    "cb_gate": "gate",
    "cb_hybrid": "hybr",
    "uniform_head": "unif",
    "refiner": "refi",
    "expansion": "exp",
    "talking_heads": "talk",
    "less_attention": "less",
    "extra_block": "extra",
}


def zoo(
    families: Annotated[
        list[str] | None, typer.Argument(help="Families (modules of timm) or models; all if none is given.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure anew, with the timm that is installed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """What works on which family of timm's models, and why the rest does not.

    A number says in how many places a modification changes the family's smallest member. With --measure any model of
    timm's can be asked for by its name.

    \b
    Examples:
      vitrefine zoo
      vitrefine zoo swin_transformer xcit
      vitrefine zoo mobilevitv2_050 --measure
      vitrefine zoo --json
    """
    rows = _measured(families) if measure else _committed(families)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], ensure_ascii=False))
    elif families:
        _print_rows(rows)
    else:
        _print_matrix(rows)


def _hint(name: str, known: set[str], otherwise: str) -> str:
    """Names that begin as this one does, else the one most like it."""
    near = sorted(other for other in known if other.startswith(name))[:_HINTS]
    near = near or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _committed(asked: list[str] | None) -> "list[Row]":
    from vitrefine.surgery.zoo import load

    rows = load().rows
    known = {name for row in rows for name in (row.family, row.model)}
    for name in asked or ():
        if name not in known:
            hint = _hint(name, known, "--measure tries any model of timm's")
            raise UserError(f"the zoo has no family or model {name!r}; {hint}")
    return [row for row in rows if not asked or {row.family, row.model} & set(asked)]


def _measured(asked: list[str] | None) -> "list[Row]":
    import timm

    from vitrefine.surgery import census

    rows: list[Row] = []
    for name in asked or census.families():
        if name in census.families():
            rows += census.measure_family(name)
        elif timm.is_model(name):
            rows.append(census.measure(name))
        else:
            hint = _hint(name, {*census.families(), *timm.list_models()}, "vitrefine zoo lists families")
            raise UserError(f"timm has no family or model {name!r}; {hint}")
    return rows


def _print_matrix(rows: "list[Row]") -> None:
    """All families in eighty columns."""
    console = wide_console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("family", overflow="fold")
    shown = [row for row in rows if not row.excluded]
    for modification in shown[0].outcomes:
        table.add_column(SHORT.get(modification, modification), justify="right", no_wrap=True)
    for row in shown:
        table.add_row(row.family, *(str(o.changes) if o.works else "–" for o in row.outcomes.values()))
    console.print(table)
    excluded = ", ".join(row.family for row in rows if row.excluded)
    console.print(f"No attention to change: {excluded}.", highlight=False, markup=False)
    console.print("Why something does not apply: vitrefine zoo FAMILY.", highlight=False, markup=False)


def _print_rows(rows: "list[Row]") -> None:
    """Each model with a line for each modification."""
    console = wide_console()
    for row in rows:
        console.print(Text.assemble((row.family, "bold"), f" as {row.model}"))
        if row.excluded:
            console.print(f"  {row.excluded}.", highlight=False, markup=False)
            continue
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, outcome in row.outcomes.items():
            places = f"{outcome.changes} place{'s' * (outcome.changes != 1)}"
            new = f", {outcome.new_parameters:+,} parameters" if outcome.new_parameters else ""
            table.add_row(f"  +{name}", Text(f"{places}{new}" if outcome.works else f"– {outcome.reason}"))
        console.print(table)
