"""Accuracy on the test images: every image once, whatever the number of processes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from vitrefine.data.dataset import Batch, Loader
from vitrefine.errors import UserError
from vitrefine.train.output import logits_of
from vitrefine.train.processes import everyones, greatest, met_here


@dataclass(frozen=True)
class Evaluation:
    """Per cent of images whose class comes first, or among the first five; mean cross-entropy."""

    top1: float
    top5: float
    loss: float
    right: Tensor  # for each image in order, whether its class came first

    @property
    def bitmap(self) -> str:
        """`right` as hexadecimal digits, the first image in the highest bit."""
        return np.packbits(self.right.numpy()).tobytes().hex()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    accelerator: Accelerator,
    *,
    in_step: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Test a model; None if it was asked to stop.

    Args:
        model: Left in the mode that it was in.
        loader: Of test images.
        accelerator: For precision, and for what the other processes found.
        in_step: All processes must run the model equally often, as FSDP's do.
        stop: Asked after each batch; all processes must get the same answer.
    """
    was_training = model.training
    model.eval()
    found: list[tuple[Tensor, ...]] = []
    try:
        # Compiled code is made for the shapes and the mode of training.
        with torch.compiler.set_stance("force_eager"):
            for batch, counts in _batches(loader, accelerator, in_step):
                with accelerator.autocast():
                    logits = logits_of(model(batch.images)).float()
                if counts:
                    found.append(_score(logits, batch))
                if stop():
                    return None
    finally:
        model.train(was_training)
    return _summary(found, accelerator)


def _batches(loader: Loader, accelerator: Accelerator, in_step: bool) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether they count; in step, a process that has run out repeats its last one, which does not."""
    done, batch = 0, None
    for batch in met_here(loader.epoch(0)):
        done += 1
        yield batch, True
    if in_step and batch is not None:
        (most,) = greatest(accelerator, len(loader))
        yield from itertools.repeat((batch, False), int(most) - done)


def _score(logits: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """Number, right, right among five, and loss of each image; on the device, for nothing is waited for here."""
    classes = batch.targets
    best = logits.topk(min(5, logits.shape[-1])).indices == classes[:, None]
    return batch.index, best[:, 0], best.any(dim=1), F.cross_entropy(logits, classes, reduction="none")


def _summary(found: list[tuple[Tensor, ...]], accelerator: Accelerator) -> Evaluation:
    own = tuple(torch.cat(column).cpu() for column in zip(*found, strict=True))
    parts = [part for part in everyones(accelerator, own) if part]
    if not parts:
        raise UserError("there is no test image to evaluate on; give the data set a test part")
    index, right, right5, loss = (torch.cat(column) for column in zip(*parts, strict=True))
    order = index.argsort()
    if len(index.unique()) != len(index):
        raise RuntimeError("a test image was seen twice")
    return Evaluation(
        100 * right.double().mean().item(),
        100 * right5.double().mean().item(),
        loss[order].double().mean().item(),
        right[order],
    )
