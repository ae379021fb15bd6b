"""Launches without Triton's analysis of the arguments, where a call of the same kind has been analysed before.

That analysis takes longer than these kernels run. What a kernel is compiled for follows from the inputs of the
operator (shapes, strides, types, alignment), so one look at those finds all compiled kernels of a call.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

Result = TypeVar("Result")
_COMPILED: dict[Hashable, dict[Hashable, tuple[CompiledKernel, tuple]]] = {}


def on_its_device(operator: Callable[..., Result]) -> Callable[..., Result]:
    """Have an operator launch on the device of its first tensor, whatever device is the current one."""

    @functools.wraps(operator)
    def guarded(tensor: Tensor, *arguments: Any) -> Result:
        with torch.cuda.device_of(tensor):
            return operator(tensor, *arguments)

    return guarded


def kind(tensor: Tensor | None) -> Hashable:
    """All that a kernel's code depends on of a tensor argument."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


class Bound:
    """A kernel with its constants, and with those arguments that stay the same from launch to launch.

    Args:
        compiled: Kernels of this kind of call that are compiled already.
        kernel: What is launched.
        before: Its first arguments.
        after: Its last ones.
        constants: Its constants and launch options.
    """

    def __init__(
        self,
        compiled: dict[Hashable, tuple[CompiledKernel, tuple]],
        kernel: Any,
        before: tuple[object, ...],
        after: tuple[object, ...],
        constants: dict[str, object],
    ) -> None:
        self.kernel, self.before, self.after, self.constants = kernel, before, after, constants
        self.compiled, self.key = compiled, (id(kernel), constants.get("ADD"))  # a kernel's own hash is slow

    def __call__(self, grid: tuple[int, int, int], *between: object) -> None:
        """Launch, with the arguments that were left out."""
        found = self.compiled.get(self.key)
        if found is not None:
            found[0][grid](*self.before, *between, *self.after, *found[1])
            return
        arguments = (*self.before, *between, *self.after)
        compiled = self.kernel[grid](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel):  # not so in the interpreter
            values = tuple(self.constants[name] for name in self.kernel.arg_names[len(arguments) :])
            self.compiled[self.key] = compiled, values


class Launcher:
    """Launches the kernels of one call of an operator.

    Args:
        operator: Its name.
        tensors: Its inputs.
        settings: Whatever else, beside the tensors, decides about constants of the kernels.
    """

    def __init__(self, operator: str, tensors: Sequence[Tensor | None], *settings: Hashable) -> None:
        self.compiled = _COMPILED.setdefault((operator, *map(kind, tensors), settings), {})

    def bind(
        self, kernel: Any, before: tuple[object, ...], after: tuple[object, ...] = (), **constants: object
    ) -> Bound:
        """A kernel that is to be launched several times; constants other than ADD follow from the call."""
        return Bound(self.compiled, kernel, before, after, constants)

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: object, **constants: object) -> None:
        """`kernel[grid](*arguments, **constants)`."""
        Bound(self.compiled, kernel, arguments, (), constants)(grid)


def forget() -> None:
    """Drop what is known, for instance after tile sizes were changed."""
    _COMPILED.clear()
