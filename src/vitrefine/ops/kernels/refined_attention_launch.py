"""Launches without Triton's analysis of the arguments, where a call of the same kind has been analysed before.

That analysis takes longer than these kernels run. What a kernel is compiled for follows from the inputs of the
operator (shapes, strides, types, alignment), so one look at those finds all compiled kernels of a call.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

_COMPILED: dict[Hashable, dict[Hashable, tuple[CompiledKernel, tuple]]] = {}


def kind(tensor: Tensor | None) -> Hashable:
    """All that a kernel's code depends on of a tensor argument."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


class Launcher:
    """Launches the kernels of one call of an operator.

    Args:
        operator: Its name.
        tensors: Its inputs.
        settings: Whatever else, beside the tensors, decides about constants of the kernels.
    """

    def __init__(self, operator: str, tensors: list[Tensor | None], *settings: Hashable) -> None:
        self.compiled = _COMPILED.setdefault((operator, *map(kind, tensors), settings), {})

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: object, **constants: object) -> None:
        """`kernel[grid](*arguments, **constants)`; constants other than ADD may not change within a call."""
        key = kernel, constants.get("ADD")
        if key in self.compiled:
            compiled, values = self.compiled[key]
            compiled[grid](*arguments, *values)
            return
        compiled = kernel[grid](*arguments, **constants)
        if isinstance(compiled, CompiledKernel):  # not so in the interpreter
            self.compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def forget() -> None:
    """Drop what is known, for instance after tile sizes were changed."""
    _COMPILED.clear()


def matmul_precision(dtype: torch.dtype) -> str:
    """float32 products follow PyTorch's own switch for tensor-float-32.

    Where it is allowed, each product is three of them: maps, mix and values are all factors of the result, and
    the truncation of tensor cores in one product each adds up to 0.25 %.
    """
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
