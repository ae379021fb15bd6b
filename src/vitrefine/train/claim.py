"""Taking a folder for a run, and what run.json says of it."""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version

from vitrefine import __version__
from vitrefine.data.dataset import DataSet
from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.train.device import in_words
from vitrefine.train.fit import Fit
from vitrefine.train.job import Job, Line
from vitrefine.train.lock import FolderLock
from vitrefine.train.recipe import dump_recipe
from vitrefine.train.resume import check_same
from vitrefine.train.run import CHECKPOINTS, RECIPE, RUN, read_run, write_about
from vitrefine.train.setup import Setup


def identity(job: Job, data: DataSet, fitting: Fit) -> Line:
    """What run.json says of a run before it is built, and by which it is known again."""
    return {
        "spec": str(fitting.spec),
        "base_spec": job.spec,
        "data": job.data,
        "fingerprint": data.fingerprint,
        "recipe": job.recipe_name,
        "seed": job.seed,
        "weights": job.weights,
        "at_once": job.at_once,
    }


def claim(job: Job, about: Line, lock: FolderLock) -> Line | None:
    """Take the folder; the result if it holds this run, finished."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{job.folder} cannot be made a folder: {error.strerror}; choose another with --out") from error
    lock.take()
    if not (job.folder / RUN).exists():
        if any((job.folder / CHECKPOINTS).glob("*.pt")):
            wrong = f"{job.folder} holds checkpoints, but no {RUN} that says of what run"
            raise UserError(f"{wrong}; restore that, or choose another --out")
        return None
    run = read_run(job.folder)
    if not job.resume:
        raise UserError(f"{job.folder} holds a run already; continue it with --resume, or choose another --out")
    check_same(run, about, job.recipe)
    about["started"] = run.about.get("started")
    about["at_once"] = max(job.at_once, run.told.at_once)  # the speed of the whole run is not that of one alone,
    about["device"] = run.told.device  # nor that of the device on which it ends
    return asdict(run.result) if run.about["status"] == "finished" and run.result else None


def open_folder(setup: Setup, about: Line) -> None:
    """Write recipe.yaml and run.json; `about` is filled in."""
    job = setup.job
    about |= _describe(job, setup, before=about.get("device", ""))
    about.setdefault("started", datetime.now(UTC).isoformat(timespec="seconds"))
    if not (job.folder / RUN).exists():
        # Before run.json: where that is, the recipe can be read.
        replace_file(job.folder / RECIPE, dump_recipe(job.recipe).encode())
    write_about(job.folder, about)


def _describe(job: Job, setup: Setup, before: str) -> Line:
    accelerator = setup.accelerator
    device = in_words(accelerator.device)
    libraries = {name: version(name) for name in ("torch", "timm", "accelerate", "numpy")}
    return {
        "size": list(setup.fit.size),
        "params": setup.params,
        "macs": setup.macs,
        "device": before if before.endswith(device) else f"{before}, then {device}" if before else device,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "versions": {"vitrefine": __version__, "python": platform.python_version(), **libraries},
        "command": job.command(),
        "status": "running",
    }
