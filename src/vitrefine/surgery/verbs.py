"""The modifications as Python functions: `broadcast(model, "cb_s")` is `apply(model, "cb_s")` with a signature.

Each changes the model in place and returns the report of what it changed; options are explained where they are
declared, at the function of the modification's name.
"""

from typing import Literal

from torch import nn

from vitrefine.surgery.operate import Report, apply
from vitrefine.surgery.selection import Layers, Stages

Constraint = Literal["spatial", "row+col"] | None


def broadcast(
    model: nn.Module,
    kind: Literal["cb", "cb_s", "cb_gate", "cb_hybrid"] = "cb",
    *,
    position: Literal["front", "mid", "end"] = "end",
    block: Literal["mlp", "attention", "both"] = "mlp",
    layers: Layers | None = None,
) -> Report:
    """Context Broadcasting; `layers=None` is the kind's own default: all for cb_s, the upper half for the others."""
    chosen = {} if layers is None else {"layers": layers}
    return apply(model, kind, position=position, block=block, **chosen)


def refine(
    model: nn.Module,
    *,
    expansion: int = 3,
    kernel_size: int = 3,
    constraint: Constraint = None,
    share: int = 0,
    variant: Literal["paper", "official"] = "paper",
    layers: Layers = "all",
) -> Report:
    """The Refiner: attention maps expanded, convolved and reduced."""
    return apply(
        model,
        "refiner",
        expansion=expansion,
        kernel_size=kernel_size,
        constraint=constraint,
        share=share,
        variant=variant,
        layers=layers,
    )


def dla(model: nn.Module, *, kernel_size: int = 3, constraint: Constraint = None, layers: Layers = "all") -> Report:
    """Distributed local attention: each attention map convolved."""
    return apply(model, "dla", kernel_size=kernel_size, constraint=constraint, layers=layers)


def expand(model: nn.Module, *, ratio: int = 3, layers: Layers = "all") -> Report:
    """Attention maps expanded to more heads and reduced again."""
    return apply(model, "expansion", ratio=ratio, layers=layers)


def talk(model: nn.Module, *, layers: Layers = "all") -> Report:
    """Talking heads: attention maps mixed across heads."""
    return apply(model, "talking_heads", layers=layers)


def uniform(
    model: nn.Module, *, mode: Literal["replace", "widen", "append"] = "replace", layers: Layers = "all"
) -> Report:
    """A head that averages all that it sees."""
    return apply(model, "uniform_head", mode=mode, layers=layers)


def squeeze(model: nn.Module, *, reduction: int = 16, layers: Layers = "all") -> Report:
    """Squeeze-and-excitation at the end of the MLP."""
    return apply(model, "se", reduction=reduction, layers=layers)


def deform(model: nn.Module, *, variant: Literal["retrofit", "paper"] = "retrofit", stages: Stages = "all") -> Report:
    """Deformable token merging."""
    return apply(model, "dtm", variant=variant, stages=stages)


def less_attention(model: nn.Module, *, stages: Stages = (1, 2)) -> Report:
    """Attention taken out of the early stages of a pyramid, MLPs kept."""
    return apply(model, "less_attention", stages=stages)


def extra_block(model: nn.Module, *, kind: Literal["msa", "mlp"] = "msa") -> Report:
    """One more residual block of attention or MLP at the end of the model."""
    return apply(model, "extra_block", kind=kind)
