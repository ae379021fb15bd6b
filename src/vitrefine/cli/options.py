"""Options that commands have in common."""

from typing import Annotated

import typer

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
