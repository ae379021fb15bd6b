"""`vitrefine models`: the models of this package, and the papers' models beside what the papers print."""

import dataclasses
import fnmatch
import inspect
import itertools
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrefine.cli.console import wide_console
from vitrefine.cli.info import MACS_NOTE, build, cost_of, show_count, show_size
from vitrefine.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from vitrefine.models.published import Published

_MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * in it.")] = "*",
    papers: Annotated[bool, typer.Option("--papers", help="Set the papers' figures beside ours.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """The models of this package: parameters, MACs at their own size, and a line on each.

    timm's models can be used by their names as well; this list leaves them out.

    \b
    Examples:
      vitrefine models
      vitrefine models lit --json
      vitrefine models --papers
    """
    rows = _published(pattern) if papers else _registered(pattern)
    if not rows:
        raise UserError(f"no model of this package is named like {pattern!r}; `vitrefine models` lists them")
    if as_json:
        typer.echo(json.dumps(rows))
    elif papers:
        _print_published(rows)
    else:
        _print_registered(rows)


def _is_like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern if "*" in pattern else f"*{pattern}*")


def _registered(pattern: str) -> list[dict[str, Any]]:
    import timm

    import vitrefine.models  # noqa: F401  (registers them)

    rows = []
    for name in filter(lambda name: _is_like(name, pattern), timm.list_models()):
        entry_point = timm.model_entrypoint(name)
        if entry_point.__module__.startswith("vitrefine.models."):
            cost = cost_of(name)
            counts = {"params": cost.params, "macs": cost.macs, "size": cost.size}
            rows.append(
                {"model": name, **counts, "description": (inspect.getdoc(entry_point) or "").partition("\n")[0]}
            )
    return rows


def _published(pattern: str) -> list[dict[str, Any]]:
    from vitrefine.models.published import PUBLISHED

    return [_beside_ours(row) for row in PUBLISHED if _is_like(row.model, pattern)]


def _beside_ours(row: "Published") -> dict[str, Any]:
    """A row of the papers with our counts and whether they agree at the precision that the paper prints."""
    from vitrefine.models.cost import measure
    from vitrefine.models.published import at_precision

    model, size, channels = build(row.model, (row.size, row.size))
    cost = measure(model, size, channels)
    params = cost.params
    if not row.head:
        classifier: nn.Module = model.get_classifier()  # type: ignore[operator]
        params -= sum(parameter.numel() for parameter in classifier.parameters())
    return {
        **dataclasses.asdict(row),
        "our_params": params,
        "our_macs": cost.macs,
        "params_agree": at_precision(params, row.params, row.rounding) == row.params,
        "macs_agree": row.macs is None or at_precision(cost.macs, row.macs) == row.macs,
    }


def _print_registered(rows: list[dict[str, Any]]) -> None:
    table = Table("model", box=None, header_style="bold", pad_edge=False)
    for column in ("parameters", "MACs", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        numbers = show_count(row["params"]), show_count(row["macs"]), show_size(row["size"])
        table.add_row(row["model"], *numbers, Text(row["description"]))
    console = wide_console()
    console.print(table)
    console.print(MACS_NOTE, highlight=False)


def _print_published(rows: list[dict[str, Any]]) -> None:
    table = Table("", box=None, header_style="bold", pad_edge=False)
    table.add_column("size", justify="right")
    for printed in ("paper's\nparams", "paper's\nMACs"):
        table.add_column(printed, justify="right", no_wrap=True)
        table.add_column("   ours", no_wrap=True)  # padded by hand, so that a mark moves no digit
    notes: list[str] = []

    def marked(text: str, row: dict[str, Any], agrees: bool) -> str:
        text = f"{text:>7}"
        if agrees:
            return text
        note = row["note"] or "differs from the paper at the precision it prints"
        if note not in notes:
            notes.append(note)
        return text + _MARKS[notes.index(note)]

    for source, group in itertools.groupby(rows, key=lambda row: row["source"]):
        table.add_row(source, style="bold")
        for row in group:
            params = marked(f"{row['our_params'] / 1e6:.2f}M", row, row["params_agree"])
            macs = marked(f"{row['our_macs'] / 1e9:.2f}G", row, row["macs_agree"])
            table.add_row(Text(row["model"]), str(row["size"]), row["params"], params, row["macs"] or "–", macs)
    console = wide_console()
    console.print(table)
    for mark, note in zip(_MARKS, notes, strict=False):
        console.print(f"{mark} {note}.", highlight=False)
    if not all(row["head"] for row in rows):
        console.print("The parameters of lit_* are without the classifier, as in the paper.", highlight=False)
    console.print(MACS_NOTE, highlight=False)
