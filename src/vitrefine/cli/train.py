"""`vitrefine train`: train a model, and never lose the run."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrefine.cli.launched import is_first
from vitrefine.cli.options import Data, RecipeName, Settings, Weights
from vitrefine.errors import UserError

if TYPE_CHECKING:
    from vitrefine.train.job import Job, Result

Strings = list[str]


def train(
    spec: Annotated[str, typer.Argument(help="A model, with its modifications if any: vit_tiny_patch16_224+cb.")],
    data: Data = "digits",
    recipe: RecipeName = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run's folder; runs/<spec>-<data>-s<seed> if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights, order, augmentation and dropout.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder, if there is one.")] = False,
    weights: Weights = None,
    track: Annotated[
        Strings | None, typer.Option(metavar="TRACKER", help="Log to tensorboard, wandb or trackio as well.")
    ] = None,
) -> None:
    """Train a model on a data set.

    Everything is written into one folder. A run that is killed continues with --resume, to the same bits as if nothing
    had happened; SIGTERM and Ctrl-C write a checkpoint first. On several GPUs or machines launch it with Accelerate.

    \b
    Examples:
      vitrefine train vit_tiny_patch16_224+cb
      vitrefine train vit_small_patch16_224+refiner --data cifar100:data/cifar100 --seed 1
      vitrefine train lit_ti --data imagenet:/data/imagenet --recipe lit_ti --track tensorboard
      vitrefine train vit_tiny_patch16_224 --set optim.lr=5e-4 --set epochs=50 --out runs/slow
      vitrefine train vit_tiny_patch16_224 --set optim.lr=5e-4 --set epochs=50 --out runs/slow --resume
      accelerate launch --num_processes 8 -m vitrefine.cli train lit_s --data wds:'train-{0000..0999}.tar' --recipe lit
    """
    from vitrefine.train.defaults import default_folder, default_recipe
    from vitrefine.train.job import Job
    from vitrefine.train.recipe import load_recipe

    name, overrides = recipe or default_recipe(data), tuple(settings or ())
    folder = out or default_folder(spec, data, seed)
    try:
        chosen = load_recipe(name, overrides)
        job = Job(spec, data, chosen, name, folder, seed, resume, overrides, weights, tuple(track or ()))
        result = _run(job)
    except UserError as error:
        if not is_first() and not _is_of_one_process(error):
            sys.exit(2)  # the first process says it for all
        raise
    if result is not None and is_first():
        achieved = f"{result.top1:.2f} % of {result.test_images} test images right"
        use = f'use it with vitrefine.load("{folder}"), see it with: vitrefine report {shlex.quote(str(folder))}'
        typer.echo(f"{achieved}; the model is {folder}/model.safetensors; {use}")


def _is_of_one_process(error: UserError) -> bool:
    from vitrefine.train.processes import OfOneProcess

    return isinstance(error, OfOneProcess)


def _run(job: "Job") -> "Result | None":
    """The result; None if the run was stopped."""
    import torch.distributed as dist

    from vitrefine.cli.progress import TrainingView
    from vitrefine.train.engine import train as fit
    from vitrefine.train.job import Stopped, silent

    try:
        if not is_first():
            return fit(job, watch=silent)
        with TrainingView() as view:
            return fit(job, watch=view)
    except Stopped as stopped:
        if is_first():
            again = " ".join([job.command(), *(f"--track {name}" for name in job.track), "--resume"])
            typer.echo(f"stopped after step {stopped.step}; continue with: {again}")
        return None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
