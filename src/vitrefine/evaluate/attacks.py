"""Attacks that know the model, bounded in L∞, on pixels before they are normalised.

FGSM (Goodfellow et al., 2014): x + ε · sign(∇ₓ loss), kept within 0 … 1.
PGD (Madry et al., 2018): steps of x ← x + α · sign(∇ₓ loss), after each kept within ε of the image and within 0 … 1,
from a random point within ε. Here α = 2.5 ε / steps, with which every point of the box can be reached.

Epsilons are given in levels of 255, as they are printed: 1 means 1/255. The CB paper (Table 8) does not say its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.evaluate.change import Change
from vitrefine.evaluate.draws import each_drawn
from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.subject import Subject

Logits = Callable[[Tensor], Tensor]
"""From pixels (B, C, H, W) between 0 and 1 to logits (B, classes), with gradients."""

REACH = 2.5


def fgsm(logits: Logits, pixels: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """One step to where the loss grows; `epsilon` in levels of 255."""
    return (pixels + epsilon / 255 * _uphill(logits, pixels, targets)).clamp(0, 1)


def pgd(
    logits: Logits,
    pixels: Tensor,
    targets: Tensor,
    epsilon: float,
    *,
    steps: int = 10,
    step: float | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Many such steps.

    Args:
        logits: The model.
        pixels: (B, C, H, W), from 0 to 1.
        targets: Class numbers (B,).
        epsilon: How far a pixel may go, in levels of 255.
        steps: How many.
        step: How long, in levels of 255; 2.5 · epsilon / steps if None.
        start: Where to begin; at the image if None.
    """
    reach = epsilon / 255
    length = (REACH * epsilon / steps if step is None else step) / 255
    attacked = pixels if start is None else start
    for _ in range(steps):
        attacked = attacked + length * _uphill(logits, attacked, targets)
        attacked = attacked.clamp(pixels - reach, pixels + reach).clamp(0, 1)
    return attacked


def _uphill(logits: Logits, pixels: Tensor, targets: Tensor) -> Tensor:
    """The sign of the gradient; the sum over the batch leaves every image its own."""
    with torch.enable_grad():
        free = pixels.detach().requires_grad_()
        loss = F.cross_entropy(logits(free), targets, reduction="sum")
        if not loss.requires_grad:
            raise UserError("attacks need gradients, and this model computes without; leave out robustness, or no_grad")
        (gradient,) = torch.autograd.grad(loss, free)
    return gradient.sign()


@dataclass(frozen=True)
class FGSM(Change):
    """FGSM with an epsilon in levels of 255."""

    epsilon: float

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        return fgsm(subject.logits, shown.pixels, shown.targets, self.epsilon)


@dataclass(frozen=True)
class PGD(Change):
    """PGD with an epsilon in levels of 255, from a point that each image's number and the seed decide."""

    epsilon: float
    steps: int = 10
    seed: int = 0

    def __call__(self, subject: Subject, shown: Shown) -> Tensor:
        away = each_drawn(
            shown, lambda image, chance: torch.empty_like(image).uniform_(-1, 1, generator=chance), self.seed
        )
        start = (shown.pixels + self.epsilon / 255 * away).clamp(0, 1)
        return pgd(subject.logits, shown.pixels, shown.targets, self.epsilon, steps=self.steps, start=start)
