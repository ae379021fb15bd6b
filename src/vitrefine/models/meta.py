"""A model without its numbers: for finding out, at no cost, what it would do."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose tensors have shapes and no storage."""
    owned = [*model.parameters(), *model.buffers()]
    # Caches and tables that were never registered as buffers.
    owned += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    stand_in: dict[int, Any] = {}
    for tensor in owned:
        shadow = torch.empty_like(tensor, device="meta", requires_grad=False)
        stand_in[id(tensor)] = nn.Parameter(shadow, False) if isinstance(tensor, nn.Parameter) else shadow
    return copy.deepcopy(model, stand_in).eval()
