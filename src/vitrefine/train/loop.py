"""The loop: updates, lines of the log, checkpoints, tests.

Nothing waits for the device from one update to the next: losses are summed there, and looked at when a line of the log
or a checkpoint is due. That is also when a loss that is no number is found.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from vitrefine.data.dataset import Batch
from vitrefine.errors import UserError
from vitrefine.train.agreement import Agreement
from vitrefine.train.checkpoint import Checkpoints
from vitrefine.train.clock import Clock
from vitrefine.train.evaluation import Evaluation, evaluate
from vitrefine.train.health import check_loss, check_progress, check_weights, improves
from vitrefine.train.job import Line, Stopped, Watcher
from vitrefine.train.memory import peak_memory
from vitrefine.train.processes import mean_of, met_here, on_main, share_buffers
from vitrefine.train.rng import seed_epoch, set_generators
from vitrefine.train.setup import Setup
from vitrefine.train.tracking import MetricsFile, track


@dataclass
class Outputs:
    """Where a run writes, and who is told."""

    checkpoints: Checkpoints
    metrics: MetricsFile
    watch: Watcher


class Loop:
    """A run from where its state is to its end.

    Args:
        setup: What works.
        outputs: What is written.
        asked: Whether this process was asked to stop.
        last: The checkpoint that is continued, if one is,
        generators: and the states of random number generators in it, by rank.
    """

    def __init__(
        self,
        setup: Setup,
        outputs: Outputs,
        asked: Callable[[], bool],
        last: Path | None,
        generators: list[dict[str, Any]],
    ) -> None:
        self.setup, self.state, self.outputs, self.asked = setup, setup.state, outputs, asked
        self.accelerator, self.recipe = setup.accelerator, setup.recipe
        self.lr = _greatest_lr(self.state.optimizer)
        self.last, self._generators = last, generators
        self._agreement = Agreement(self.accelerator, asked)
        self._clock = Clock(self.state.progress)

    def run(self) -> Evaluation:
        """Train to the end and test."""
        progress, tested = self.state.progress, None
        while progress.epoch < self.recipe.epochs:
            train_loss = self._train_epoch()
            tested = self._test() if self._is_tested(progress.epoch + 1) else None
            self._end_epoch(train_loss, tested)
        return tested or self._test()

    def _is_tested(self, epoch: int) -> bool:
        every = self.recipe.test_epochs
        return epoch == self.recipe.epochs or (every is not None and epoch % every == 0)

    def _train_epoch(self) -> float:
        progress, updates = self.state.progress, self.setup.updates_per_epoch
        batches = self._batches()
        self._clock.start_training()
        while progress.batch < updates:
            self._update(batches)
            if not self._clock.warm:
                self._losses()
                self._clock.lap()
            if progress.step % self.recipe.log_every == 0:
                self._log()
            if self._agreement.to_stop(progress.step):
                self._stop()
            every = self.recipe.checkpoint_steps
            if every and progress.step % every == 0 and progress.batch < updates:
                self._losses()
                self._clock.lap()
                self._checkpoint()
                self._clock.start_training()
        _, loss = self._losses()
        self._clock.lap()
        return loss / updates

    def _batches(self) -> Iterator[Batch]:
        progress, rank = self.state.progress, self.accelerator.process_index
        start = progress.batch * self.recipe.accumulate
        for number, batch in enumerate(met_here(self.setup.train_loader.epoch(progress.epoch, start))):
            if number == 0:
                if start and rank < len(self._generators):
                    set_generators(self._generators[rank], self.accelerator.device)
                else:
                    seed_epoch(self.setup.job.seed, progress.epoch, rank, progress.batch)
            yield batch
        raise UserError(f"{self.setup.job.data} gave fewer batches than it has images for; see what it skipped")

    def _update(self, batches: Iterator[Batch]) -> None:
        state, progress, accumulate = self.state, self.state.progress, self.recipe.accumulate
        for i in range(accumulate):
            batch = next(batches)
            with self.accelerator.no_sync(state.model) if i < accumulate - 1 else nullcontext():
                with self.accelerator.autocast():
                    loss = self.setup.objective(state.model, batch) / accumulate
                self.accelerator.backward(loss)
            state.sums += loss.detach()
        if self.recipe.optim.clip_grad is not None:
            self.accelerator.clip_grad_norm_(state.model.parameters(), self.recipe.optim.clip_grad)
        self.setup.optimizer.step()
        self.setup.optimizer.zero_grad(set_to_none=True)
        progress.step, progress.batch, progress.window = progress.step + 1, progress.batch + 1, progress.window + 1
        self.lr = _greatest_lr(state.optimizer)
        state.schedule.step_update(progress.step)
        if state.ema is not None:
            state.ema.update(self.setup.raw, step=progress.step)

    def _losses(self) -> tuple[float, float]:
        """Sums since the last line and of this epoch; here is where the device is waited for."""
        window, epoch = mean_of(self.accelerator, self.state.sums).tolist()
        check_loss(epoch, self.state.progress.step, self.lr, self.last)
        return window, epoch

    def _log(self) -> None:
        progress, (window, _) = self.state.progress, self._losses()
        self._clock.lap()
        line = {"kind": "step", "step": progress.step, "epoch": progress.epoch + 1, "loss": window / progress.window}
        self._emit(line | {"lr": self.lr, "images_per_s": self._clock.window_rate(self.recipe.batch)})
        self.state.sums[0] = 0
        progress.window = 0

    def _test(self) -> Evaluation:
        share_buffers(self.accelerator, self.setup.tested)
        alone = self.accelerator.num_processes == 1
        tested = evaluate(
            self.setup.tested,
            self.setup.test_loader,
            self.accelerator,
            in_step=self.setup.sharded,
            stop=lambda: alone and self.asked(),
        )
        return tested or self._stop()

    def _end_epoch(self, train_loss: float, tested: Evaluation | None) -> None:
        state, progress = self.state, self.state.progress
        progress.epoch, progress.batch = progress.epoch + 1, 0
        state.sums[1] = 0
        line = {"kind": "epoch", "epoch": progress.epoch, "step": progress.step, "train_loss": train_loss}
        if tested:
            line |= {"test_loss": tested.loss, "top1": tested.top1, "top5": tested.top5}
        line |= {"lr": self.lr}
        line |= self._clock.epoch_figures(self.recipe.batch) | {"memory_mib": peak_memory(self.accelerator)}
        skipped = self.setup.train_loader.skipped + self.setup.test_loader.skipped
        self._emit(line | ({"skipped": dict(skipped)} if skipped else {}))
        if improves(train_loss, progress.best_loss):
            progress.best_loss, progress.best_epoch = train_loss, progress.epoch
        finished = progress.epoch == self.recipe.epochs
        if finished or progress.epoch % self.recipe.checkpoint_epochs == 0:
            self._checkpoint()
        if finished:
            return
        since = progress.epoch - progress.best_epoch
        check_progress(since, self.recipe.stall_epochs, train_loss, progress.step, self.lr, self.last)
        if self._agreement.to_stop(progress.step, now=True):
            self._stop()

    def _checkpoint(self) -> None:
        self._losses()
        self._clock.tick()
        progress, snapshot = self.state.progress, self.state.snapshot()

        def write() -> Path:
            check_weights(snapshot["model"], progress.step, self.lr, self.last)
            self.outputs.metrics.sync()
            return self.outputs.checkpoints.write(progress.step, snapshot)

        self.last = on_main(self.accelerator, write)

    def _stop(self) -> NoReturn:
        self._checkpoint()
        raise Stopped(self.state.progress.step)

    def _emit(self, line: Line) -> None:
        on_main(self.accelerator, lambda: self.outputs.metrics.add(line))
        track(self.accelerator, line)
        tell = self.outputs.watch.on_epoch if line["kind"] == "epoch" else self.outputs.watch.on_step
        tell(line)


def _greatest_lr(optimizer: torch.optim.Optimizer) -> float:
    return max(group["lr"] for group in optimizer.param_groups)
