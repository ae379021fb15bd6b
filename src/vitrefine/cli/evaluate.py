"""`vitrefine evaluate`: how good a model is, what it withstands, and how fast it is."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrefine.cli.options import check_out
from vitrefine.errors import UserError

if TYPE_CHECKING:
    from vitrefine.evaluate.evaluation import Evaluation

Strings = list[str]


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|RUN|SPEC", help="A .safetensors file, a run's folder, or a spec.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="As in `train`, or imagenet-v2:PATH, imagenet-a:PATH; a run's own if left out.",
        ),
    ] = None,
    suite: Annotated[
        Strings | None,
        typer.Option("--suite", metavar="SUITE", help="accuracy, robustness, rfc, speed or all; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Test on N images at most, drawn at random.")] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Take the published weights of a spec.")] = False,
    crop_ratio: Annotated[
        float | None,
        typer.Option(metavar="R", help="Of the crop; above 1 pads with black. The model's own if left out."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="N|HxW", help="Size of the images; the model's own if left out.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Draws of each noise.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of noise, attacks, halves and the draw of --limit.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 4,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="The GPU, if there is one.")] = None,
    precision: Annotated[str, typer.Option(metavar="fp32|bf16", help="Of the model's arithmetic.")] = "fp32",
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where predictions are kept; ~/.cache/vitrefine/predictions if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object here too.")] = None,
) -> None:
    """Test a model: accuracy and calibration, robustness, receptive-field calibration, speed.

    Predictions are kept by the content of model and images: a second suite does not compute them again, and what was
    interrupted goes on when the same command is given. The figures of a run are also put into its evaluation.json, from
    which `vitrefine report` shows them.

    \b
    Examples:
      vitrefine evaluate runs/vit_tiny_patch16_224-cb-digits-s0
      vitrefine evaluate deit_tiny_patch16_224 --pretrained --data imagenet:/data/imagenet --suite all
      vitrefine evaluate deit_tiny_patch16_224 --pretrained --data imagenet-a:/data/imagenet-a
      vitrefine evaluate model.safetensors --data folder:photos --suite robustness --limit 1000
      vitrefine evaluate model.safetensors --data folder:photos --suite rfc --suite speed --json --out figures.json
    """
    if out is not None:
        check_out(out)
    from vitrefine.cli.info import parse_size
    from vitrefine.diagnose.named import run_of

    run = run_of(model)
    if data is None and run is None:
        raise UserError(f"{model} is no run, which would know its data; say with --data what to test it on")
    options: dict[str, Any] = {
        "pretrained": pretrained,
        "limit": limit,
        "size": None if size is None else parse_size(size),
        "crop_ratio": crop_ratio,
        "repeats": repeats,
        "seed": seed,
        "batch": batch,
        "workers": workers,
        "device": device,
        "precision": precision,
        "cache": cache or True,
    }
    found = _watched(model, data or (run.data if run else ""), suite or ["accuracy"], options)
    try:
        typer.echo(json.dumps(found.as_dict()) if as_json else str(found))
    finally:  # what can be kept is kept, whatever befalls the rest
        if out is not None:
            found.write(out)
        if run is not None:
            _add(run.folder, found)


def _add(folder: Path, found: "Evaluation") -> None:
    from vitrefine.evaluate.evaluation import FILE, add_to_run

    try:
        add_to_run(folder, found)
    except (OSError, UserError) as error:
        raise UserError(
            f"these figures cannot be put into {folder / FILE}, where reports look for them; see that there is room "
            "and that it may be written, or keep them with --out"
        ) from error


def _watched(model: str, data: str, suites: list[str], options: dict[str, Any]) -> "Evaluation":
    from torch import OutOfMemoryError

    from vitrefine.cli.evaluation_view import EvaluationView
    from vitrefine.evaluate.suite import evaluate as test

    try:
        with EvaluationView() as view:
            return test(model, data, suites, watch=view, **options)
    except OutOfMemoryError as error:
        raise UserError(f"{options['batch']} images at once need too much memory; give a smaller --batch") from error
    except KeyboardInterrupt:
        again = shlex.join(["vitrefine", *sys.argv[1:]])
        typer.echo(f"what is computed so far is kept; go on with: {again}", err=True)
        raise
