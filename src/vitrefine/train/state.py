"""All that a run consists of at a moment, as one dictionary that any number of processes can continue from.

Weights and the optimiser's state are whole and go by the names of parameters (`torch.distributed.checkpoint`), whether
they were in one process, copied over several (DDP) or cut into shards (FSDP2).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vitrefine.train.processes import everyones
from vitrefine.train.rng import generators_state

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_GIVEN = StateDictOptions(full_state_dict=True)


@dataclass
class Progress:
    """How far a run is."""

    epoch: int = 0  # epochs finished
    batch: int = 0  # updates done in this epoch
    step: int = 0  # updates done
    window: int = 0  # updates since the last line of the log
    best_loss: float = math.inf  # of an epoch
    best_epoch: int = 0
    timed_updates: int = 0  # those that throughput is measured by,
    training_seconds: float = 0.0  # and how long they took
    seconds: float = 0.0  # testing and checkpoints too


class Schedule(Protocol):
    """timm's schedules, as far as they are used."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def step_update(self, num_updates: int) -> None: ...


@dataclass
class State:
    """The parts of a run that change."""

    accelerator: Accelerator
    model: nn.Module  # wrapped
    optimizer: torch.optim.Optimizer  # not wrapped
    schedule: Schedule
    ema: ModelEmaV3 | None
    sums: Tensor  # of losses: since the last line of the log, and of this epoch
    progress: Progress

    def weights(self) -> dict[str, Tensor]:
        """What is tested and saved: the running mean where there is one. On the main process; all have to call."""
        model = self.model if self.ema is None else self.ema.module
        weights: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
        return weights

    def snapshot(self) -> dict[str, Any]:
        """Everything, on the main process; all have to call."""
        accelerator = self.accelerator
        return {
            "model": get_model_state_dict(self.model, options=_WHOLE),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE),
            "schedule": self.schedule.state_dict(),
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            "generators": everyones(accelerator, generators_state(accelerator.device)),
            "sums": self.sums.cpu(),
            "progress": asdict(self.progress),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Everything as it was, except for random number generators: those are set when the first batch is there."""
        set_model_state_dict(self.model, saved["model"], options=_GIVEN)
        set_optimizer_state_dict(self.model, self.optimizer, saved["optimizer"], options=_GIVEN)
        self.schedule.load_state_dict(saved["schedule"])
        if self.ema is not None:
            self.ema.module.load_state_dict(saved["ema"])
        if self.accelerator.scaler and saved["scaler"]:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        self.sums.copy_(saved["sums"])
        self.progress = Progress(**saved["progress"])
