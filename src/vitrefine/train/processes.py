"""Several processes that act as one: what one does for all, and what all agree on."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from vitrefine.errors import UserError

T = TypeVar("T")


class OfOneProcess(UserError):
    """A mistake that one process met and the others know nothing of, such as an image that it alone reads."""


def met_here(items: Iterator[T]) -> Iterator[T]:
    """The same items; a `UserError` among them is of this process alone."""
    try:
        yield from items
    except UserError as error:
        raise OfOneProcess(str(error)) from error


def on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """Let the main process do something; all get what it returned, or its `UserError`, so that none waits in vain."""
    if accelerator.num_processes == 1:
        return act()
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = act()
        except UserError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0, device=accelerator.device)
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return cast(T, outcome[0])


def everyones(accelerator: Accelerator, value: T) -> list[T]:
    """The values of all processes, by rank."""
    if accelerator.num_processes == 1:
        return [value]
    values: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(values, value)
    return values


def mean_of(accelerator: Accelerator, value: Tensor) -> Tensor:
    """The mean over processes; a copy."""
    if accelerator.num_processes == 1:
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / accelerator.num_processes


def greatest(accelerator: Accelerator, *values: float) -> list[float]:
    """Of each value the greatest over processes."""
    if accelerator.num_processes == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def share_buffers(accelerator: Accelerator, *models: nn.Module) -> None:
    """Give all processes the main one's buffers: each has its own running statistics of batches, after a step."""
    if accelerator.num_processes > 1:
        for model in models:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)
