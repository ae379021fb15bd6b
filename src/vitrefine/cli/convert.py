"""`vitrefine convert`: a checkpoint of the authors' repositories as a file that our models load."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrefine.errors import UserError

if TYPE_CHECKING:
    from vitrefine.models.convert import Converted

_INPUT = ("mean", "std", "crop_pct", "input_size", "interpolation")


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint that the authors' code saved.")],
    source: Annotated[str, typer.Option("--from", metavar="refiner|lit", help="Whose code that was.")],
    out: Annotated[Path, typer.Option(metavar="X.safetensors", help="The file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Turn a checkpoint of the Refiner's or LIT's authors into one that loads here.

    The model is recognised by its weights. No code that the checkpoint may carry is run.

    \b
    Examples:
      vitrefine convert refiner_s.pth.tar --from refiner --out s.safetensors
      vitrefine convert lit_ti.pth --from lit --out lit_ti.safetensors
    """
    _check_out(out, force)
    from vitrefine.models.convert import SOURCES
    from vitrefine.models.convert import convert as read
    from vitrefine.surgery.spec import Call, Spec, show
    from vitrefine.surgery.weights import write

    if source not in SOURCES:
        raise UserError(f"--from {source} is unknown; choose {' or '.join(SOURCES)}")
    converted = read(file, source)
    spec = Spec(Call(converted.name, converted.arguments))
    write(out, converted.state, {"spec": str(spec), "input": _images(converted)})
    arguments = ", ".join(f"{key}={show(value)}" for key, value in spec.base.args.items())
    typer.echo(f"model       {converted.name}")
    typer.echo(f"arguments   {arguments or 'none'}")
    typer.echo(f"parameters  {converted.params:,}")
    typer.echo(f"written     {out} ({out.stat().st_size / 1e6:.1f} MB)")


def _check_out(out: Path, force: bool) -> None:
    """Say what is wrong with the output before any work is done."""
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} has to end in .safetensors")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not force:
        raise UserError(f"{out} is there already; add --force to replace it")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent} to write {out.name} into; create it first")


def _images(converted: "Converted") -> dict[str, Any]:
    """How the authors prepare images for this model."""
    from timm.models import get_pretrained_cfg

    config: Any = get_pretrained_cfg(converted.name)
    images = {key: getattr(config, key) for key in _INPUT}
    if side := converted.arguments.get("img_size"):
        images["input_size"] = (3, side, side)
    return images
