"""`vitrefine diagnose`: what does a model attend to, and what would help it?"""

from pathlib import Path
from typing import Annotated

import typer

from vitrefine.cli.options import check_out
from vitrefine.errors import UserError


def diagnose(
    model: Annotated[str, typer.Argument(metavar="SPEC|CHECKPOINT|RUN", help="What to look into.")],
    second: Annotated[
        str | None, typer.Argument(metavar="SECOND", help="Another, to be put beside it; +MOD continues the first.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="DATA", help="As in `train`, or a plain folder of images; a run's own if left out."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="How many to look at; ten batches of 32 are the Refiner's.")] = 320,
    out: Annotated[Path, typer.Option(metavar="PAGE.html", help="The page.")] = Path("diagnosis.html"),
    csv: Annotated[
        bool, typer.Option("--csv", help="Print the numbers by layer and head as CSV, in the place of the summary.")
    ] = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Give specs their published weights, which may be downloaded.")
    ] = False,
) -> None:
    """See how a model attends: entropy, distance, heads, features, layer by layer, and maps on images.

    Writes one self-contained HTML page, and beside it its numbers as CSV and JSON. Fused attention, compiled and
    modified models are no obstacle. Two models are put side by side: before and after surgery, before and after
    training.

    \b
    Examples:
      vitrefine diagnose runs/vit_tiny_patch16_224-digits-s0
      vitrefine diagnose model.safetensors --data photos/ --images 64 --out photos.html
      vitrefine diagnose vit_small_patch16_224 --pretrained --data imagenet:data/imagenet
      vitrefine diagnose runs/baseline-s0 runs/cb-s0 --out both.html
      vitrefine diagnose vit_tiny_patch16_224 +cb --data digits --csv > both.csv
    """
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"--out {out} is to be a page; name a file that ends in .html")
    check_out(out)

    import sys
    from dataclasses import replace

    import torch
    from rich.console import Console

    from vitrefine.diagnose.diagnosis import rows_to_csv, to_json_text
    from vitrefine.diagnose.named import is_saved
    from vitrefine.diagnose.subject import open_subject
    from vitrefine.files import replace_file
    from vitrefine.report.diagnosis import examine, told_apart, write_diagnosis
    from vitrefine.report.words import plural

    asked = [(model, ""), *([] if second is None else [(model, second) if second.startswith("+") else (second, "")])]
    shown = _data_of([name for name, _ in asked], data)
    if pretrained and all(is_saved(name) for name, _ in asked):
        raise UserError(f"{model} holds its own weights; leave --pretrained out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(stderr=True)
    examined = []
    for name, modification in asked:
        with console.status(f"looking into {name}{modification}"):
            subject = open_subject(name, modification, pretrained=pretrained, device=device)
            examined.append(examine(subject, shown, images))
    names = told_apart([each.name for each in examined])
    diagnoses = [replace(each.diagnosis, model=name) for each, name in zip(examined, names, strict=True)]
    table = rows_to_csv(row for diagnosis in diagnoses for row in diagnosis.rows())
    command = ["vitrefine", "diagnose", *sys.argv[2:]]
    write_diagnosis(examined, out, command)
    replace_file(out.with_suffix(".csv"), table.encode())
    replace_file(out.with_suffix(".json"), to_json_text(diagnoses, shown).encode())
    if csv:
        typer.echo(table, nl=False)
        return
    for each in examined:
        typer.echo(f"{each.name}, {plural(each.diagnosis.images, 'image')}, {each.weights}")
        for sentence in each.diagnosis.findings:
            typer.echo(f"  - {sentence}")
    typer.echo(f"\nthe page is {out}; all numbers are in {out.with_suffix('.csv')} and {out.with_suffix('.json')}")


def _data_of(models: list[str], asked: str | None) -> str:
    """What was asked for, or the data of the runs among the models; a path to nowhere is refused in any case."""
    from vitrefine.diagnose.named import run_of

    runs = [run for run in map(run_of, models) if run is not None]
    if asked is not None:
        return asked
    if not runs:
        raise UserError(f"{models[0]} is no run, which would know its data; say with --data on which images to look")
    other = next((run for run in runs if run.data != runs[0].data), None)
    if other is not None:
        raise UserError(
            f"{runs[0].folder} is a run on {runs[0].data} and {other.folder} one on {other.data}; say with --data on "
            "which images to look"
        )
    return runs[0].data
