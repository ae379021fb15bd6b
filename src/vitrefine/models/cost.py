"""What a model costs: parameters, multiply-accumulates and activations, in all and part by part.

MACs are the multiply-accumulates of matrix products, convolutions, deformable convolutions and the two products of
attention; papers print them as FLOPs. Elementwise work (norms, activations, softmax, sums) is not counted.
Activations are the elements that those same operations put out, for one image.

A copy of the model runs on the meta device: shapes only, so a large model at a large size takes no memory and next to
no time. There `F.scaled_dot_product_attention` is always its two plain products, so the kernel that a real device
would pick makes no difference to the count.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchvision.ops  # noqa: F401  (registers torch.ops.torchvision.deform_conv2d)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitrefine.errors import UserError
from vitrefine.models.meta import meta_copy

ITSELF = "(itself)"  # what a model owns or does outside its parts: a class token, a position embedding, a product


@dataclass(frozen=True)
class StageCost:
    """The share of one part of a model."""

    name: str
    params: int
    macs: int
    activations: int
    shape: tuple[int, ...]  # of its output, for one image; empty where it puts out no tensor


@dataclass(frozen=True)
class Cost:
    """What a model costs on one image of a size; the stages add up to the whole."""

    params: int
    macs: int
    activations: int
    size: tuple[int, int]
    stages: list[StageCost]


def _inner_product(out: Tensor, left: Tensor, right: Tensor) -> int:
    return out.numel() * left.shape[-1]


def _added_inner_product(out: Tensor, added: Tensor, left: Tensor, right: Tensor) -> int:
    return out.numel() * left.shape[-1]


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    transposed = len(rest) > 4 and rest[4]
    positions = x if transposed else out  # a transposed convolution lays its kernel down once an input element
    return positions.numel() * math.prod(weight.shape[1:])


def _deformable_convolution(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    return out.numel() * math.prod(weight.shape[1:])


_aten = torch.ops.aten
_MACS: dict[Any, Callable[..., int]] = {
    _aten.mm: _inner_product,
    _aten.bmm: _inner_product,
    _aten.mv: _inner_product,
    _aten.dot: _inner_product,
    _aten.addmm: _added_inner_product,
    _aten.baddbmm: _added_inner_product,
    _aten.addmv: _added_inner_product,
    _aten.convolution: _convolution,
    torch.ops.torchvision.deform_conv2d: _deformable_convolution,
}


def _shape(output: Any) -> tuple[int, ...]:
    """The shape of the first tensor of a module's output, without the batch."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return next((shape for item in output if (shape := _shape(item))), ())
    return tuple(output.shape[1:]) if isinstance(output, Tensor) else ()


class _Meter(TorchDispatchMode):
    """Books every counted operation to the innermost part that is running."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.macs: Counter[str] = Counter()
        self.activations: Counter[str] = Counter()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._running = [ITSELF]
        for name, part in parts.items():
            part.register_forward_pre_hook(lambda module, args, name=name: self._running.append(name))
            part.register_forward_hook(lambda module, args, output, name=name: self._finish(name, output))

    def _finish(self, name: str, output: Any) -> None:
        self._running.pop()
        self.shapes[name] = _shape(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = _MACS.get(func.overloadpacket)
        if count is not None:
            self.macs[self._running[-1]] += count(out, *args)
            self.activations[self._running[-1]] += out.numel()
        return out


def _holds_blocks(module: nn.Module) -> bool:
    """A list of blocks or stages, as opposed to a stem or a head that happens to be written as a Sequential."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return isinstance(module, nn.Sequential) and any(any(True for _ in part.children()) for part in module)


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """The parts to report: the shallowest level of the model that has a list of blocks, with the lists split."""
    level: dict[str, nn.Module] = {"": model}

    def split(which: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
        for name, part in level.items():
            if which(part):
                prefix = f"{name}." if name else ""
                yield from ((prefix + child_name, child) for child_name, child in part.named_children())
            else:
                yield name, part

    while not any(map(_holds_blocks, level.values())):
        deeper = dict(split(lambda part: any(True for _ in part.children())))
        if deeper.keys() == level.keys():
            break  # no list of blocks anywhere: these are the leaves
        level = deeper
    parts = dict(split(_holds_blocks))
    parts.pop("", None)  # a model that is one leaf has no parts
    return parts


def _parameters_by_part(model: nn.Module, parts: dict[str, nn.Module]) -> Counter[str]:
    """Parameters of each part; one that several parts share belongs to the first."""
    seen: set[int] = set()
    counts: Counter[str] = Counter()
    for name, part in [*parts.items(), (ITSELF, model)]:
        for parameter in part.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                counts[name] += parameter.numel()
    return counts


def measure(model: nn.Module, size: tuple[int, int], in_chans: int = 3) -> Cost:
    """Count what the model costs on one image. The model itself is neither run nor changed.

    Args:
        model: Any model that takes a batch of images.
        size: Height and width of the image.
        in_chans: Channels of the image.
    """
    # Inference mode would hand linear layers and convolutions to the meter under names of its own.
    with torch.inference_mode(False), torch.no_grad(), torch.device("meta"):
        shadow = meta_copy(model)
        parts = _parts(shadow)
        dtype = next((p.dtype for p in shadow.parameters() if p.is_floating_point()), torch.get_default_dtype())
        meter = _Meter(parts)
        try:
            with meter:
                shadow(torch.empty(1, in_chans, *size, dtype=dtype))
        except RuntimeError as error:
            if "meta tensors" not in str(error):
                raise
            raise UserError(
                f"{type(model).__name__} chooses its path by the values in its tensors, so its cost cannot be counted "
                "from shapes; count a model that does not"
            ) from error
    params = _parameters_by_part(shadow, parts)
    stages = [
        StageCost(name, params[name], meter.macs[name], meter.activations[name], meter.shapes.get(name, ()))
        for name in [*parts, ITSELF]
        if params[name] or meter.macs[name]
    ]
    return Cost(params.total(), meter.macs.total(), meter.activations.total(), size, stages)
