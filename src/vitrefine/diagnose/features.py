"""The tokens between the blocks of a model: what goes into the first one, and what comes out of each.

A block is the module that holds the residual sum around an attention or an MLP, found by watching the model run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.maps import layout_of
from vitrefine.surgery.survey import Survey, survey
from vitrefine.surgery.watch import tensors_in

INPUT = "input"  # the name of what goes into the first block

OnTokens = Callable[[str, Tensor], None]


def block_names(found: Survey) -> list[str]:
    """The blocks of a model in the order in which they run."""
    parts = {site.name for site in found.attentions} | {site.end for site in found.mlps}
    blocks: dict[str, None] = {}
    for name in found.visits:
        if name in parts:
            blocks[_block_of(name, found)] = None
    order = list(found.visits)
    return sorted((name for name in blocks if name), key=order.index)


def _block_of(name: str, found: Survey) -> str:
    owner = name
    while owner := owner.rpartition(".")[0]:
        if owner in found.visits and found.visits[owner].adds_input:
            return owner
    return name.rpartition(".")[0]


def as_tokens(x: Tensor, size: tuple[int, int], module: nn.Module) -> Tensor:
    """A block's output as (B, N, C)."""
    if x.ndim == 3:
        return x
    if x.ndim != 4:
        return x.flatten(1, -2) if x.ndim > 4 else x[:, None]
    nchw = layout_of(tuple(x.shape), size, module) == "NCHW"
    return x.flatten(2).mT if nchw else x.flatten(1, 2)


@contextmanager
def capture_features(model: nn.Module, on_tokens: OnTokens, size: tuple[int, int] = (1, 1)) -> Iterator[list[str]]:
    """Hand the tokens between blocks to `on_tokens(name, (B, N, C))` while the context lasts; gives the names.

    Args:
        model: Any model that attends or has MLPs.
        on_tokens: Called for the input of the first block and the output of each, in the order in which they run.
        size: Of the images, to tell maps that have channels first from those that have them last.
    """
    inner = unwrap_model(model)
    names = block_names(survey(inner))
    if not names:
        raise UserError(f"{type(inner).__name__} has no blocks to look between: it neither attends nor has an MLP")

    def hand_on(name: str, module: nn.Module, value: Any) -> None:
        if module is not inner.get_submodule(names[0] if name == INPUT else name):
            return  # a copy, made to find something out
        tensor = next((t for t in tensors_in(value) if t.is_floating_point() and t.ndim >= 2), None)
        if tensor is not None:
            on_tokens(name, as_tokens(tensor.detach(), size, module))

    hooks: list[Any] = []
    first = inner.get_submodule(names[0])
    hooks.append(
        first.register_forward_pre_hook(lambda m, args, kwargs: hand_on(INPUT, m, (args, kwargs)), with_kwargs=True)
    )
    for name in names:
        module = inner.get_submodule(name)
        hooks.append(module.register_forward_hook(lambda m, _, output, name=name: hand_on(name, m, output)))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield [INPUT, *names]
    finally:
        for hook in hooks:
            hook.remove()
