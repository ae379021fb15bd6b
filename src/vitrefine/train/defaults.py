"""What is taken where the user does not say: a recipe for the data, and a folder for the run."""

import re
from pathlib import Path

RUNS = Path("runs")


def default_recipe(data: str) -> str:
    """The shipped recipe for a data set, by its text."""
    kind = data.partition(":")[0]
    if kind == "wds":
        return "deit_cb_small"  # deit, but for its repeated images, which a stream does not have
    return "cifar" if kind in ("cifar10", "cifar100") else "digits" if kind == "digits" else "deit"


def default_folder(spec: str, data: str, seed: int) -> Path:
    """`runs/vit_tiny_patch16_224-cb-digits-s0`."""
    kind, _, place = data.partition(":")
    name = kind if kind.startswith(("cifar", "digits", "imagenet")) or not place else Path(place.split("::")[0]).name
    name = re.split(r"[*?{[]", Path(name).name)[0]  # of shards, what comes before their numbers
    return RUNS / f"{_slug(spec)}-{_slug(name)}-s{seed}"


def _slug(text: str) -> str:
    # Long specs are cut: file systems end names at 255 bytes. Two that are then alike are told apart when they start.
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:100] or "data"
