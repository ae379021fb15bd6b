"""Running a copy of a model once, to watch it: without storage, so that it costs next to nothing."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.models.meta import meta_copy
from vitrefine.surgery.inputs import BATCH, example_inputs

# Sides of images that a model which does not tell its own may be made for, the likeliest first.
USUAL_SIZES = (224, 256, 32, 64, 384, 96, 128, 160, 192, 112, 240, 288, 320, 448, 512, 56, 48, 28, 36, 40, 72, 80)

Inputs = dict[str, Tensor]
Watching = TypeVar("Watching")


def rehearse(
    model: nn.Module, watch: Callable[[nn.Module], AbstractContextManager[Watching]], inputs: Inputs | None = None
) -> Watching:
    """Run a copy of a model, in eval mode, while `watch(copy)` is active; the model itself is neither run nor changed.

    Args:
        model: Any PyTorch model.
        watch: Makes, for the copy, the context in which it runs.
        inputs: Arguments of its forward by name ("" for the first); found from its configuration if None.

    Returns:
        What the context gave.
    """
    failure: Exception | None = None
    for given in _guesses(model) if inputs is None else [inputs]:
        try:
            return _rehearse(model, watch, given)
        except UserError:
            if failure is None:
                raise
        # Most likely an image of another size is wanted; or something besides the image, or a batch as a dict.
        except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as error:
            failure = failure or error
    reason = str(failure).strip().partition("\n")[0]
    if inputs is None and (names := " and ".join(example_inputs(model))):
        raise UserError(
            f"{type(model).__name__} does not run on {names} alone ({reason}); change the part of it that does"
        ) from failure
    raise UserError(
        f"{type(model).__name__} runs on no image of a usual size ({reason}); "
        "set its attribute img_size to the size that it takes, or change the part of it that takes images alone"
    ) from failure


def _guesses(model: nn.Module) -> Iterator[Inputs]:
    """The input a model says it takes; then images of usual sizes, for not all say that theirs was changed."""
    first = example_inputs(model)
    yield first
    if list(first) == [""]:
        channels = first[""].shape[1]
        for size in USUAL_SIZES:
            yield {"": torch.empty(BATCH, channels, size, size, device="meta")}


def _rehearse(
    model: nn.Module, watch: Callable[[nn.Module], AbstractContextManager[Watching]], inputs: Inputs
) -> Watching:
    with torch.inference_mode(False), torch.no_grad():
        try:
            with torch.device("meta"):
                return _run(meta_copy(model), watch, inputs)
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            if any(p.is_meta for p in model.parameters()):
                raise UserError(
                    f"{type(model).__name__} chooses its path by the values in its tensors, and this one has none: "
                    "create it on a real device"
                ) from error
        return _run(copy.deepcopy(model).eval(), watch, inputs)  # its path depends on values: they have to be there


def _run(model: nn.Module, watch: Callable[[nn.Module], AbstractContextManager[Watching]], inputs: Inputs) -> Watching:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    given = {
        name: torch.zeros_like(
            value, device=like.device, dtype=like.dtype if value.is_floating_point() else value.dtype
        )
        for name, value in inputs.items()
    }
    with watch(model) as watching:
        model(*[v for k, v in given.items() if not k], **{k: v for k, v in given.items() if k})
    return watching
