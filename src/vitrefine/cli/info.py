"""`vitrefine info`: what a model costs, and where."""

import dataclasses
import itertools
import json
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrefine.cli.console import wide_console
from vitrefine.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from vitrefine.models.cost import Cost

Size = tuple[int, int]

MACS_NOTE = (
    "MACs: multiply-accumulates of matrix products, convolutions, deformable convolutions and attention products, for "
    "one image; papers print them as FLOPs."
)
_STEPS = (32, 16, 14, 8)  # patch sizes and total strides of nearly every vision model
_NEAREST = 2  # how many sizes to propose


def info(
    spec: Annotated[str, typer.Argument(help="A model, with its modifications if any: vit_small_patch16_224+cb.")],
    size: Annotated[
        str | None, typer.Option(metavar="N|HxW", help="Size of the image; the model's own if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Parameters, MACs and activations of a model, in all and stage by stage.

    \b
    Examples:
      vitrefine info vit_small_patch16_224
      vitrefine info refined_vit_s --size 384
      vitrefine info vit_small_patch16_224+refiner+cb_s
      vitrefine info resnet50 --size 256x320 --json
      vitrefine info 'vit_small_patch16_224(img_size=32,patch_size=4)'
    """
    cost = cost_of(spec, None if size is None else parse_size(size))
    if as_json:
        typer.echo(json.dumps({"spec": spec, **dataclasses.asdict(cost)}))
    else:
        _print(spec, cost)


def parse_size(text: str) -> Size:
    """Height and width: `384` or `256x320`."""
    sides = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text)
    if sides is None:
        raise UserError(f"--size {text} is no size; write 224, or 256x320 for height and width")
    return int(sides[1]), int(sides[2] or sides[1])


def show_size(size: Size) -> str:
    """`224` for a square, else `256x320`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def show_count(count: int) -> str:
    """Four digits or so and a unit: 22.05 M."""
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return str(count)


def _print(spec: str, cost: "Cost") -> None:
    console = wide_console()
    console.print(Text.assemble((spec, "bold"), f" at {cost.size[0]}x{cost.size[1]}"))
    table = Table("part", "output", box=None, header_style="bold", pad_edge=False)
    for column in ("parameters", "MACs", "activations"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in cost.stages:
        shape = "x".join(map(str, stage.shape))
        table.add_row(stage.name, shape, *map(show_count, (stage.params, stage.macs, stage.activations)))
    table.add_section()
    table.add_row("all", "", *map(show_count, (cost.params, cost.macs, cost.activations)), style="bold")
    console.print(table)
    console.print(f"{MACS_NOTE} Activations: the elements that these operations put out.", highlight=False)


def build(spec: str, size: Size | None = None) -> tuple["nn.Module", Size, int]:
    """A model without storage for its weights, the size of its images and their channels.

    Args:
        spec: The model.
        size: Of the images, given to the model where it fixes its size when it is made; its own if None.
    """
    import torch

    from vitrefine.surgery.base import NAMES
    from vitrefine.surgery.create import create
    from vitrefine.surgery.inputs import example_inputs
    from vitrefine.surgery.spec import parse

    parsed = parse(spec)
    _, channels_name, size_name = NAMES[parsed.library]
    with torch.device("meta"):
        try:
            model = create(parsed, **({} if size is None else {size_name: size[0] if size[0] == size[1] else size}))
        except UserError as error:
            if size is None or size_name not in str(error):
                raise
            model = create(parsed)  # it takes images of any size
    if size is not None and not _covers(model, size):
        raise UserError(f"{spec} would cut the edge off an image of {size[0]}x{size[1]}")
    inputs = example_inputs(model)
    if any(value.ndim != 4 for value in inputs.values()):
        raise UserError(f"{spec} takes {' and '.join(inputs)}; info counts what an image costs, and an image alone")
    ((_, channels, *image),) = (value.shape for value in inputs.values())
    args: Any = parsed.base.args
    own_size = args.get(size_name, image)
    height, width = (own_size, own_size) if isinstance(own_size, int) else own_size
    return model, size or (height, width), args.get(channels_name, channels)


def _covers(model: "nn.Module", size: Size) -> bool:
    """Whether a model sees the whole image: timm's patch embedding drops what does not fill a patch."""
    from timm.layers import PatchEmbed

    embedding = getattr(model, "patch_embed", None)
    if not isinstance(embedding, PatchEmbed) or embedding.dynamic_img_pad:
        return True
    return all(side % patch == 0 for side, patch in zip(size, embedding.patch_size, strict=True))


def cost_of(spec: str, size: Size | None = None) -> "Cost":
    """What a model costs at a size, or at its own."""
    from vitrefine.models.cost import measure

    if size is None:
        return measure(*build(spec))
    try:
        return measure(*build(spec, size))
    except Exception as failure:
        own_size = measure(*build(spec)).size  # raises what it has to, if the size is not at fault
        near = sorted(itertools.islice(filter(partial(_takes, spec), _sizes_near(size)), _NEAREST))
        remedy = (
            f"nearest sizes it can: {', '.join(map(show_size, near))}" if near else f"its own is {show_size(own_size)}"
        )
        raise UserError(f"{spec} cannot take {size[0]}x{size[1]}; {remedy}") from failure


def _sizes_near(size: Size) -> list[Size]:
    """Sizes that some model could take, the nearest first."""
    down = {(size[0] // step * step, size[1] // step * step) for step in _STEPS}
    up = {(-(-size[0] // step) * step, -(-size[1] // step) * step) for step in _STEPS}
    near = [candidate for candidate in down | up if min(candidate) > 0 and candidate != size]
    return sorted(near, key=lambda candidate: (math.dist(candidate, size), candidate))


def _takes(spec: str, size: Size) -> bool:
    from vitrefine.models.cost import measure

    try:
        measure(*build(spec, size))
    except Exception:
        return False
    return True
