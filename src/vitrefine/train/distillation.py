"""Distillation (DeiT, Section 3): a teacher's predictions as targets, for a head of their own where the model has one.

    hard   (1 − α) CE(ψ(z), y) + α CE(ψ(z_d), argmax z_t)
    soft   (1 − α) CE(ψ(z), y) + α τ² KL(ψ(z_t/τ) ‖ ψ(z_d/τ))

z are the student's logits, z_d those of its distillation token, which are z in a model that has none, and z_t the
teacher's. The paper trades the two terms of `hard` evenly, α = ½. The KL is a mean over images, as in the paper; the
authors' code divides by the number of classes as well.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.train.cross_entropy import at_least_single, soft_cross_entropy
from vitrefine.train.options import Distillation
from vitrefine.train.output import logits_of
from vitrefine.train.teacher import Teacher


class DistillationLoss(nn.Module):
    """The loss of a model that returns (logits, distillation logits) in training, or logits alone.

    Args:
        options: Kind, share and temperature.
        teacher: Whose predictions these are.
    """

    def __init__(self, options: Distillation, teacher: Teacher) -> None:
        super().__init__()
        self.options = options
        self.teacher = teacher

    def forward(self, output: Any, images: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(output)
        student = output[1] if isinstance(output, tuple) and len(output) == 2 else logits
        student, teacher = at_least_single(student), at_least_single(self.teacher(images))
        alpha, temperature = self.options.alpha, self.options.temperature
        if self.options.kind == "hard":
            learnt = F.cross_entropy(student, teacher.argmax(dim=1))
        else:
            student, teacher = (F.log_softmax(z / temperature, dim=1) for z in (student, teacher))
            learnt = temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return (1 - alpha) * soft_cross_entropy(logits, targets) + alpha * learnt
