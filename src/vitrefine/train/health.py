"""When to give up: a loss that is no number, weights that are none, and a loss that has stalled."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vitrefine.errors import UserError

LEAST_GAIN = 1e-3  # a new minimum is lower by this share at least: noise alone makes minima for ever


def check_loss(loss: float, step: int, lr: float, last: Path | None) -> None:
    """Refuse to go on with a loss that is no number.

    Args:
        loss: Mean over some steps.
        step: The last of them.
        lr: The learning rate there.
        last: The last checkpoint, which was written before.
    """
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step} (learning rate {lr:.3g}); {_rescue(last)}; "
            "lower optim.lr, or set optim.clip_grad=1"
        )


def check_weights(state: Mapping[str, Tensor], step: int, lr: float, last: Path | None) -> None:
    """Refuse to write weights that are no numbers: the loss shows them one step later."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"{name} is no longer finite at step {step} (learning rate {lr:.3g}); {_rescue(last)}; "
                "lower optim.lr, or set optim.clip_grad=1"
            )


def improves(loss: float, best: float) -> bool:
    """Whether a loss is a new minimum worth the name."""
    return loss < best - LEAST_GAIN * abs(best) if math.isfinite(best) else True


def check_progress(epochs: int, allowed: int | None, loss: float, step: int, lr: float, last: Path | None) -> None:
    """Refuse to go on when the loss has stalled.

    Args:
        epochs: Since its last new minimum.
        allowed: How many may be; None for any number.
        loss: Of the last epoch.
        step, lr, last: As above.
    """
    if allowed is not None and epochs >= allowed:
        raise UserError(
            f"the loss has stalled: no new minimum for {epochs} epochs, {loss:.4g} at step {step} "
            f"(learning rate {lr:.3g}); {_rescue(last)}; change optim.lr, or set stall_epochs=null to go on"
        )


def _rescue(last: Path | None) -> str:
    return f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
