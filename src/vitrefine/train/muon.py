"""Muon, with all matrices of one shape made orthogonal together.

timm's Muon takes matrices one by one. The blocks of a transformer have dozens of them in four shapes, and a thousand
small kernels can take as long as the forward and backward pass of a small model. Here the momenta of one shape are
stacked, and the Newton–Schulz iteration runs once for the stack. Arithmetic and state are timm's: which parameters are
matrices enough, the iteration, steps as long as those of AdamW, and AdamW for all other parameters.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from timm.optim import Muon as OneByOne
from timm.optim.muon import get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor

COEFFICIENTS = [(3.4445, -4.7750, 2.0315)]  # of Muon's author; the same in each of the five iterations


class Muon(OneByOne):
    """As timm's with `ns_coefficients="original"`, in fewer and larger kernels."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update: timm's own step for what is no matrix, then ours for the matrices."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        stacks = [_by_shape(group["params"]) for group in self.param_groups]
        gradients = {p: p.grad for alike in stacks for some in alike for p in some}
        for parameter in gradients:
            parameter.grad = None  # timm's step passes over these
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, alike in zip(self.param_groups, stacks, strict=True):
            for some in alike:
                self._step_matrices(some, group)
        return loss

    def _step_matrices(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix] |= {"use_muon": True, "momentum_buffer": torch.zeros_like(matrix)}
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, [matrix.grad for matrix in matrices], 1 - group["momentum"])  # type: ignore[misc]
        flat = [momentum.flatten(1) for momentum in momenta]
        whole = flat[0] if len(flat) == 1 else torch.stack(flat)
        whole = zeropower_via_newtonschulz(whole, group["ns_steps"], COEFFICIENTS, eps=group["eps"])
        whole = whole.to(flat[0].dtype).contiguous()
        updates = [whole] if len(flat) == 1 else list(whole.unbind())
        updates = [update.reshape(matrix.shape) for update, matrix in zip(updates, matrices, strict=True)]
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, updates, alpha=-group["lr"] * get_lr_scale(flat[0].shape))


def _by_shape(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Those that have a gradient and are matrices; what is cut over several processes is alone in its list."""
    found: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and _is_matrix(parameter):
            found[id(parameter) if isinstance(parameter, DTensor) else parameter.shape].append(parameter)
    return list(found.values())


def _is_matrix(parameter: Tensor) -> bool:
    """What timm's takes for one: neither a token, a position nor a kernel of a single channel, and not too narrow."""
    if parameter.ndim < 2 or 1 in parameter.shape[:2]:
        return False
    narrow, wide = sorted((parameter.shape[0], parameter.shape[1:].numel()))
    return narrow >= 4 and wide <= 128 * narrow
