"""Finding where a model attends, where its MLPs are and how its tokens are laid out, by watching it run once.

A copy without storage runs on the meta device, so this costs milliseconds and no family is known by name: an
attention is the innermost module in whose forward a softmax over keys (or a fused attention) happens.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrefine.models.meta import meta_copy
from vitrefine.surgery.heads import HeadAxis, find_head_axis
from vitrefine.surgery.inputs import BATCH, example_inputs
from vitrefine.surgery.tap import is_softmax_over_keys, sdpa_arguments

MLP_NAME = re.compile(r"mlp|ffn|feed_?forward|channel_mix", re.IGNORECASE)
TOKEN_MIXING_NAME = re.compile(r"tokens?$", re.IGNORECASE)
TOKEN_MIXING_CLASS = re.compile(r"attention|attn|spatialgating", re.IGNORECASE)
PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, torch.einsum)


@dataclass
class Visit:
    """One module in one forward pass: the shapes of the first tensor it got and gave."""

    name: str
    module: nn.Module
    inputs: tuple[int, ...]
    output: tuple[int, ...] = ()
    attends: bool = False


@dataclass
class AttentionSite:
    """A module that attends; `maps` has the shape of the maps of each attention that one call of it computes."""

    name: str
    kind: str  # sdpa, softmax or mha (torch.nn.MultiheadAttention)
    maps: list[tuple[int, ...]] = field(default_factory=list)
    axis: HeadAxis = field(default_factory=HeadAxis)
    heads: int = 1


@dataclass(frozen=True)
class MlpSite:
    """An MLP: the modules whose input is its front, whose input is its middle, and whose output is its end."""

    front: str
    middle: str
    end: str
    layout: str  # NLC, NHWC or NCHW
    dim: int
    hidden: int


@dataclass
class Survey:
    """What a model does, in the order in which it does it."""

    attentions: list[AttentionSite]
    mlps: list[MlpSite]
    visits: dict[str, Visit]
    mixes_tokens: bool  # by attention of any kind, by an MLP across tokens or by recurrence


def first_shape(value: Any) -> tuple[int, ...]:
    """The shape of the first tensor in a module's arguments or output."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return next((shape for item in value if (shape := first_shape(item))), ())
    return ()


class _Watch(TorchFunctionMode):
    """Writes down which module runs, with what shapes, and which attends."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.visits: dict[str, Visit] = {}
        self.attentions: dict[str, AttentionSite] = {}
        self.mixes_tokens = False
        self._running: list[str] = []
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            enter = partial(self._enter, name)
            leave = partial(self._leave, name)
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(name)
        self.visits.setdefault(name, Visit(name, module, first_shape((*args, *kwargs.values()))))
        leaf = name.rsplit(".", 1)[-1]
        self.mixes_tokens |= isinstance(module, nn.RNNBase) or bool(
            TOKEN_MIXING_NAME.search(leaf) or TOKEN_MIXING_CLASS.search(type(module).__name__)
        )

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        self.visits[name].output = self.visits[name].output or first_shape(output)

    def _attends(self, kind: str, shape: tuple[int, ...]) -> None:
        self.mixes_tokens = True
        for name in self._running:
            self.visits[name].attends = True
        name = self._running[-1]
        if isinstance(self.visits[name].module, nn.Softmax):  # a softmax as a module: its owner attends
            name = self._running[-2]
        self.attentions.setdefault(name, AttentionSite(name, kind)).maps.append(shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = sdpa_arguments(args, kwargs)
            self._attends("sdpa", (*given["query"].shape[:-1], given["key"].shape[-2]))
        elif func is F.multi_head_attention_forward:
            queries, batch = args[0].shape[:2]
            self._attends("mha", (batch, args[4], queries, args[1].shape[0]))
        elif is_softmax_over_keys(func, args, kwargs):
            self._attends("softmax", tuple((args[0] if args else kwargs["input"]).shape))
        elif func in PRODUCTS:
            # Two activations multiplied by each other is attention of some kind, with or without a softmax.
            self.mixes_tokens |= not any(isinstance(a, nn.Parameter) for a in args) and len(first_shape(args)) >= 3
        return func(*args, **kwargs)


def survey(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Survey:
    """Watch one forward pass of a copy of the model; the model itself is neither run nor changed.

    Args:
        model: Any PyTorch model.
        inputs: Arguments of its forward by name ("" for the first); found from its configuration if None.
    """
    inputs = example_inputs(model) if inputs is None else inputs
    with torch.inference_mode(False), torch.no_grad():
        try:
            with torch.device("meta"):
                watch = _run(meta_copy(model), inputs)
        except RuntimeError as error:
            if "meta" not in str(error) or any(p.is_meta for p in model.parameters()):
                raise
            watch = _run(copy.deepcopy(model).eval(), inputs)  # its path depends on values: they have to be there
    for site in watch.attentions.values():
        site.axis, site.heads = find_head_axis(watch.visits[site.name].module, site.maps[0], BATCH)
    mlps = list(_find_mlps(watch.visits))
    return Survey(list(watch.attentions.values()), mlps, watch.visits, watch.mixes_tokens)


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> _Watch:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    given = {
        name: torch.zeros_like(
            value, device=like.device, dtype=like.dtype if value.is_floating_point() else value.dtype
        )
        for name, value in inputs.items()
    }
    with _Watch(model) as watch:
        model(*[v for k, v in given.items() if not k], **{k: v for k, v in given.items() if k})
    return watch


def _linears(visits: dict[str, Visit], within: str) -> list[Visit]:
    """Linear layers and 1×1 convolutions that ran inside a module, in order."""
    return [
        visit
        for name, visit in visits.items()
        if name.startswith(f"{within}.")
        and (
            isinstance(visit.module, nn.Linear)
            or (isinstance(visit.module, nn.Conv2d) and visit.module.kernel_size == (1, 1))
        )
    ]


def _find_mlps(visits: dict[str, Visit]) -> Iterator[MlpSite]:
    """MLPs by name, confirmed by what they do: two linear layers or more, and tokens out as they came in."""
    found: dict[str, MlpSite] = {}
    for name, visit in visits.items():
        parent, _, leaf = name.rpartition(".")
        if leaf == "intermediate" and f"{parent}.output.dense" in visits and not visit.attends:
            # Hugging Face splits the MLP in two, the second half of which adds the residual itself.
            end = f"{parent}.output.dropout" if f"{parent}.output.dropout" in visits else f"{parent}.output.dense"
            hidden = visits[f"{parent}.output.dense"].inputs[-1]
            found[name] = MlpSite(name, f"{parent}.output.dense", end, "NLC", visit.inputs[-1], hidden)
            continue
        named = MLP_NAME.search(leaf) or MLP_NAME.search(type(visit.module).__name__)
        if not named or TOKEN_MIXING_NAME.search(leaf) or visit.attends or visit.inputs != visit.output:
            continue
        linears = _linears(visits, name)
        if len(linears) < 2 or len(visit.inputs) not in (3, 4):
            continue
        inner = _without_residual(visits, name)
        channels_first = isinstance(linears[0].module, nn.Conv2d)
        layout = "NLC" if len(visit.inputs) == 3 else "NCHW" if channels_first else "NHWC"
        channel = 1 if layout == "NCHW" else -1
        site = MlpSite(inner, linears[-1].name, inner, layout, visit.inputs[channel], linears[-1].inputs[channel])
        # The innermost module that qualifies is the MLP; what is around it may add the residual.
        for outer in [outer for outer in found if inner == outer or inner.startswith(f"{outer}.")]:
            del found[outer]
        if not any(name.startswith(f"{other}.") for other in found):
            found[inner] = site
    yield from found.values()


def _without_residual(visits: dict[str, Visit], name: str) -> str:
    """What a wrapper such as `Residual(fn)` wraps; the name itself where there is no wrapper."""
    if "residual" not in type(visits[name].module).__name__.lower():
        return name
    inner = [child for child in visits if child.rpartition(".")[0] == name and len(_linears(visits, child)) > 1]
    return inner[0] if len(inner) == 1 else name
