"""`vitrefine compare`: does it help, on this data, and at what cost?"""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrefine.cli.launched import is_alone, is_first
from vitrefine.cli.options import Data, RecipeName, Settings, Weights
from vitrefine.errors import UserError

if TYPE_CHECKING:
    from vitrefine.report.plan import Plan
    from vitrefine.train.job import Job

Strings = list[str]
Errors = dict[tuple[str, int], str]


def compare(
    specs: Annotated[
        Strings, typer.Argument(metavar="SPEC", help="Models, or +MODIFICATION: a leading + continues the first one.")
    ],
    data: Data = "digits",
    recipe: RecipeName = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often each is trained, with seeds from 0 on.")] = 3,
    settings: Settings = None,
    weights: Weights = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at a time; small models share a GPU well, but then share its speed, too.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For runs and page; runs/compare-… if left out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in the folder.")] = False,
) -> None:
    """Train models with the same recipe and seeds, and say which is better, by how much, and at what cost.

    All specs are checked before anything is trained. The result is a table here and one self-contained HTML page.

    What is interrupted goes on with --resume; more --seeds and more specs may be added then.

    \b
    Examples:
      vitrefine compare vit_tiny_patch16_224 +cb +cb_s +refiner lit_ti
      vitrefine compare vit_small_patch16_224 +cb --data cifar100:data/cifar100 --seeds 5
      vitrefine compare deit_tiny_patch16_224 +cb_s --weights pretrained --data folder:flowers --recipe finetune
      vitrefine compare vit_tiny_patch16_224 '+refiner(expansion=2)' --set epochs=5 --seeds 1 --out runs/quick
      vitrefine compare vit_tiny_patch16_224 '+refiner(expansion=2)' --set epochs=5 --seeds 3 --out runs/quick --resume
    """
    from vitrefine.data.open import open_data
    from vitrefine.report.checks import check_specs
    from vitrefine.report.plan import Plan, check_folder, read_specs, short_hash, write_plan
    from vitrefine.train.defaults import RUNS, default_folder, default_recipe
    from vitrefine.train.job import Job
    from vitrefine.train.recipe import dump_recipe, load_recipe
    from vitrefine.train.resume import deciding

    if jobs > 1 and not is_alone():
        raise UserError(f"--jobs {jobs} and a launcher with several processes do not go together; leave out one")
    names = read_specs(specs)
    recipe_name, overrides = recipe or default_recipe(data), tuple(settings or ())
    loaded = load_recipe(recipe_name, overrides)
    text = dump_recipe(loaded)
    if out is None:
        usual = default_folder(names[0].partition("(")[0], data, 0).name.removesuffix("-s0")
        # Without the other specs, and what changes no result: with --resume, others go into the same folder.
        decides = json.dumps(deciding(loaded.model_dump(mode="json")))
        out = RUNS / f"compare-{usual}-{short_hash(names[0], data, decides, *([weights] if weights else []))}"
    command = ["vitrefine", "compare", *specs, "--data", data, "--recipe", recipe_name]
    command += [word for setting in overrides for word in ("--set", setting)]
    command += ["--weights", weights] if weights else []
    command += ["--seeds", str(seeds), *(["--jobs", str(jobs)] if jobs > 1 else []), "--out", str(out)]
    plan = Plan(names, seeds, data, recipe_name, text, shlex.join(command), weights)
    if is_first():
        check_folder(out, plan, resume)
    check_specs(names, open_data(data), loaded, weights)
    if is_first():
        _make_folder(out)
        write_plan(out, plan)

    def job(spec: str, seed: int) -> Job:
        return Job(
            spec=spec,
            data=data,
            recipe=loaded,
            recipe_name=recipe_name,
            folder=out / plan.folder(spec, seed),
            seed=seed,
            resume=True,
            overrides=overrides,
            weights=weights,
        )

    errors = _train(plan, job, jobs)
    if is_first():
        _conclude(plan, out, errors)
        # The others end well: a launcher that sees one fail ends the first, which may not have written the page yet.
        if errors:
            sys.exit(1)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made a folder: {error.strerror}; choose another with --out") from error


def _train(plan: "Plan", job: "Callable[[str, int], Job]", at_once: int) -> Errors:
    """Train what is not finished yet; why some could not be."""
    from accelerate import PartialState

    from vitrefine.cli.comparison_view import ComparisonView
    from vitrefine.report.results import label, shortened
    from vitrefine.train.engine import train
    from vitrefine.train.job import Stopped
    from vitrefine.train.processes import OfOneProcess
    from vitrefine.train.together import train_together

    jobs = [job(spec, seed) for seed, spec in plan.runs()]
    left = [each for each in jobs if not _is_finished(each.folder)]
    labels = [label(spec, plan.specs[0]) for spec in plan.specs]
    short = dict(zip(plan.specs, shortened(labels).values(), strict=True))
    names = {each.folder: f"{short[each.spec]}, seed {each.seed}" for each in jobs}
    errors: Errors = {}

    def failed(one: "Job", why: str) -> None:
        errors[one.spec, one.seed] = why
        if is_first():
            view.failed(one.folder, why)

    try:
        with ComparisonView(names, done=len(jobs) - len(left)) as view:
            if at_once > 1:
                train_together(left, at_once, lambda one: view.of(one.folder), failed, view.on_note)
            else:
                for each in left:
                    try:
                        train(each, watch=view.of(each.folder))
                    except Exception as error:  # one run that fails must not take the others with it,
                        shared = isinstance(error, UserError) and not isinstance(error, OfOneProcess)
                        if not shared and not is_alone():
                            raise  # but other processes, which know nothing of this, would wait for ever
                        failed(each, str(error) or repr(error))
    except (Stopped, KeyboardInterrupt) as end:
        if is_first():
            how = "stopped" if isinstance(end, Stopped) else "interrupted"
            typer.echo(f"{how}; go on with: {plan.command} --resume")
        raise
    finally:
        PartialState().destroy_process_group()
    return errors


def _is_finished(folder: Path) -> bool:
    from vitrefine.train.run import RUN, read_run

    if not (folder / RUN).is_file():
        return False
    try:
        run = read_run(folder)
        return run.status == "finished" and run.result is not None
    except UserError:  # a damaged run is told of when its turn comes, and does not stop the others
        return False


def _conclude(plan: "Plan", out: Path, errors: Errors) -> None:
    """Say what came of it, and write the page."""
    from vitrefine.cli.standings import present
    from vitrefine.report.collect import collect
    from vitrefine.report.page import PAGE

    present(collect([out], errors), out / PAGE)
    if errors:
        typer.echo(
            f"\n{len(errors)} of {plan.seeds * len(plan.specs)} runs failed; try again with: {plan.command} --resume"
        )
    typer.echo(f"\nthe page is {out / PAGE}")
