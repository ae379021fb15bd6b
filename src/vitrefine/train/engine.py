"""Training: `train(job)` makes a run in a folder, or continues the one that is there."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from vitrefine.data.dataset import DataSet
from vitrefine.data.open import open_data
from vitrefine.errors import UserError
from vitrefine.train.checkpoint import Checkpoints, load
from vitrefine.train.claim import claim, identity, open_folder
from vitrefine.train.finish import finish
from vitrefine.train.fit import fit
from vitrefine.train.interrupt import Interrupts
from vitrefine.train.job import Job, Line, Result, Start, Stopped, Watcher, silent
from vitrefine.train.lock import FolderLock
from vitrefine.train.loop import Loop, Outputs
from vitrefine.train.memory import forget_peak
from vitrefine.train.processes import OfOneProcess, on_main
from vitrefine.train.run import CHECKPOINTS, METRICS, write_about
from vitrefine.train.setup import Setup, build_setup, is_compiled, numerics, start_accelerator
from vitrefine.train.tracking import MetricsFile, check_trackers, start_trackers

__all__ = ["Job", "Result", "Start", "Stopped", "Watcher", "silent", "train"]


def train(job: Job, *, watch: Watcher = silent) -> Result:
    """Train a model as a job says, and write everything into its folder.

    Launched with `accelerate launch` or `torchrun`, every process calls this and gets the same result.

    Args:
        job: What to do.
        watch: Told how it goes, in the main process.

    Raises:
        UserError: For a mistake in the job, a loss that is no number or has stalled, a full disk.
        Stopped: After SIGTERM or Ctrl-C, when the checkpoint is written.
    """
    check_trackers(job.track)
    if job.recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    accelerator = start_accelerator(job)
    forget_peak(accelerator.device)
    watch = watch if accelerator.is_main_process else silent
    job.recipe.per_process(accelerator.num_processes)  # raises if it cannot be
    lock = FolderLock(job.folder)
    with ExitStack() as stack:
        stack.enter_context(numerics(job.recipe, accelerator))
        interrupts = stack.enter_context(Interrupts(watch.on_note))
        stack.callback(accelerator.free_memory)
        stack.callback(lock.release)
        data = open_data(job.data)
        fitting = fit(job.spec, data, job.recipe, weights=job.weights, say=watch.on_note)
        about = identity(job, data, fitting)
        finished = on_main(accelerator, lambda: claim(job, about, lock))
        if finished:
            watch.on_note(f"{job.folder} is finished; nothing is left to do")
            return Result(**finished)
        if is_compiled(job.recipe, accelerator.device):
            stack.callback(torch.compiler.reset)  # what it keeps would keep the model
        setup = build_setup(job, data, fitting, accelerator, watch.on_note)
        on_main(accelerator, lambda: open_folder(setup, about))
        return _run(setup, data, about, watch, lambda: interrupts.asked)


def _run(setup: Setup, data: DataSet, about: Line, watch: Watcher, asked: Callable[[], bool]) -> Result:
    """Train in a folder that is ours, and note there how it ended."""
    job, accelerator = setup.job, setup.accelerator
    outputs = Outputs(
        Checkpoints(job.folder / CHECKPOINTS, job.recipe.keep_checkpoints, watch.on_note),
        MetricsFile(job.folder / METRICS),
        watch,
    )
    try:
        last, generators = _restore(setup, outputs)
        start_trackers(accelerator, job.folder, about)
        watch.on_start(_start(setup))
        with _enough_memory(setup):
            tested = Loop(setup, outputs, asked, last, generators).run()
        result = finish(setup, data, tested)
    except BaseException as error:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        ending = {"status": "stopped"} if stopped else {"status": "failed", "error": str(error) or repr(error)}
        with suppress(UserError):  # the disk may be full, and then that is what `error` says
            _note_ending(setup, about | ending)
        raise
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
    _note_ending(setup, about | {"status": "finished"})
    watch.on_end(result)
    return result


@contextmanager
def _enough_memory(setup: Setup) -> Iterator[None]:
    """One sentence where the device has not enough."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        recipe, processes = setup.recipe, setup.accelerator.num_processes
        images = recipe.batch // processes
        most = images // 2 if recipe.mixes else images
        halved = (more for more in range(2 * recipe.accumulate, most + 1) if images % more == 0)
        remedy = "take smaller images or a smaller model"
        if accumulate := next(halved, None):
            remedy = f"continue with --resume --set accumulate={accumulate}, which computes the same in smaller steps"
        steps = f"steps of {recipe.per_process(processes)} images"
        raise OfOneProcess(f"{steps} need more memory than the device has; {remedy}") from error


def _note_ending(setup: Setup, about: Line) -> None:
    if setup.accelerator.is_main_process:
        write_about(setup.job.folder, about)


def _restore(setup: Setup, outputs: Outputs) -> tuple[Path | None, list[dict[str, Any]]]:
    """Continue from the newest checkpoint that is whole: its path and the generators' states, if there is one."""
    found: list[dict[str, Any]] = []

    def choose() -> Any:
        newest = outputs.checkpoints.newest()
        if newest is None:
            outputs.metrics.cut(0, 0)
            return None
        path, saved = newest
        found.append(saved)
        outputs.metrics.cut(saved["progress"]["step"], saved["progress"]["epoch"])
        return path

    path = on_main(setup.accelerator, choose)
    if path is None:
        return None, []
    saved = found[0] if found else load(path)
    setup.state.restore(saved)
    outputs.watch.on_note(f"continuing after step {setup.state.progress.step}, from {path}")
    return path, saved["generators"]


def _start(setup: Setup) -> Start:
    job, accelerator = setup.job, setup.accelerator
    return Start(
        spec=str(setup.fit.spec),
        data=job.data,
        folder=job.folder,
        device=accelerator.device.type,
        processes=accelerator.num_processes,
        precision={"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        params=setup.params,
        macs=setup.macs,
        epochs=job.recipe.epochs,
        updates_per_epoch=setup.updates_per_epoch,
        step=setup.state.progress.step,
    )
