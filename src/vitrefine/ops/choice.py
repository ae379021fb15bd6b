"""What `impl="auto"` goes by: whether a device runs our kernels; and one log line where they had to be passed over."""

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from vitrefine.errors import UserError

HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = (8, 0), (9, 0)
HOPPER_SHARED_BYTES = 227 << 10
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs kernels anywhere
log = logging.getLogger("vitrefine.ops")


@functools.cache
def _device_runs(index: int, capability: tuple[int, int]) -> bool:
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    # Tiles for Hopper fill its shared memory; small GPUs of later generations have less.
    room = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    enough = capability < HOPPER or room >= HOPPER_SHARED_BYTES
    return enough and torch.cuda.get_device_capability(index) >= capability


@torch.compiler.assume_constant_result
def _runs(index: int, capability: tuple[int, int]) -> bool:
    # An ONNX file holds no operators of ours.
    return not torch.onnx.is_in_onnx_export() and _device_runs(index, capability)


def runs_kernels(tensor: Tensor, capability: tuple[int, int]) -> bool:
    """Whether a tensor lives on an NVIDIA GPU of at least this compute capability, with Triton installed."""
    return tensor.is_cuda and _runs(tensor.device.index, capability)


def demand_gpu(tensor: Tensor, otherwise: str) -> None:
    """Refuse `impl="triton"` for a tensor that is not on a GPU; `otherwise` is the implementation to take there."""
    if not tensor.is_cuda and not INTERPRETED:
        raise UserError(f"impl='triton' needs a GPU, not tensors on {tensor.device}; use impl={otherwise!r}")


def exported_for_any(size: int) -> bool:
    """Whether a program is being exported for every length of an axis: no length is then to be compared with."""
    return torch.compiler.is_exporting() and isinstance(size, torch.SymInt)


def computes_in(tensor: Tensor) -> torch.dtype:
    """The type that a product of this tensor would be taken in."""
    kind = tensor.device.type
    if tensor.is_meta:  # autocast knows no meta device
        return tensor.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def no_autocast(tensor: Tensor) -> torch.autocast:
    """The context in which products of this tensor are taken in its own type."""
    return torch.autocast("cpu" if tensor.is_meta else tensor.device.type, enabled=False)


@functools.cache
def _say(message: str) -> None:
    log.warning(message)


def say_once(message: str) -> None:
    """Log a sentence the first time; a graph that is being compiled has no room for it."""
    if not torch.compiler.is_compiling():
        _say(message)
