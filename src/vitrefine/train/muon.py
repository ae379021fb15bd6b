"""Muon, with all matrices of one shape made orthogonal together.

timm's Muon takes matrices one by one. The blocks of a transformer have dozens of them in four shapes, and a thousand
small kernels can take as long as the forward and backward pass of a small model. Here the momenta of one shape are
stacked, and the Newton–Schulz iteration runs once for the stack; all other parameters are PyTorch's AdamW's, in one
kernel. Arithmetic is timm's: which parameters are matrices enough, the iteration, steps as long as those of AdamW.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from timm.optim.muon import get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

STEPS = 5
COEFFICIENTS = [(3.4445, -4.7750, 2.0315)]  # of Muon's author; the same in each of the steps


class Muon(torch.optim.Optimizer):
    """As timm's with `ns_coefficients="original"`, in fewer and larger kernels."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-7,
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "fused": True})  # tells PyTorch to load steps to the device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            others, stacks = _sorted(group["params"])
            self._step_others(others, group)
            for matrices in stacks:
                self._step_matrices(matrices, group)
        return loss

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _step_matrices(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, [matrix.grad for matrix in matrices], 1 - group["momentum"])  # type: ignore[misc]
        flat = [momentum.flatten(1) for momentum in momenta]
        whole = flat[0] if len(flat) == 1 else torch.stack(flat)
        whole = zeropower_via_newtonschulz(whole, STEPS, COEFFICIENTS, eps=group["eps"])
        whole = whole.to(flat[0].dtype).contiguous()
        updates = [whole] if len(flat) == 1 else list(whole.unbind())
        updates = [update.reshape(matrix.shape) for update, matrix in zip(updates, matrices, strict=True)]
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, updates, alpha=-group["lr"] * get_lr_scale(flat[0].shape))


def _sorted(parameters: Iterable[Tensor]) -> tuple[list[Tensor], Iterable[list[Tensor]]]:
    """Of those with a gradient: what is no matrix, and matrices by shape, but alone where cut over processes."""
    others: list[Tensor] = []
    stacks: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if _is_matrix(parameter):
            stacks[id(parameter) if isinstance(parameter, DTensor) else parameter.shape].append(parameter)
        else:
            others.append(parameter)
    return others, stacks.values()


def _is_matrix(parameter: Tensor) -> bool:
    """What timm's takes for one: neither a token, a position nor a kernel of a single channel, and not too narrow."""
    if parameter.ndim < 2 or 1 in parameter.shape[:2]:
        return False
    narrow, wide = sorted((parameter.shape[0], parameter.shape[1:].numel()))
    return narrow >= 4 and wide <= 128 * narrow
