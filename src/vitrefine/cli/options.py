"""Options that commands have in common."""

import os
from pathlib import Path
from typing import Annotated

import typer

from vitrefine.errors import UserError

# Its name is spelt out where its metavar is the same: some versions of typer would take that for the name.
Data = Annotated[
    str,
    typer.Option(
        "--data", metavar="DATA", help="digits, cifar100:PATH, folder:PATH, wds:SHARDS, hf:NAME, imagenet:PATH."
    ),
]
RecipeName = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="A shipped recipe or a YAML file; by the data if left out.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe: optim.lr=1e-3."),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="pretrained|PATH", help="Start from pretrained weights, a .safetensors file or a run."),
]


def check_out(out: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"{out} cannot be written; --out takes a file in a folder that is there and may be written to")
