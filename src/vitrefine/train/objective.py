"""What training makes small: a forward pass through the model, and the loss that the recipe names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.data.dataset import Batch
from vitrefine.errors import UserError
from vitrefine.train.cross_entropy import binary_cross_entropy, soft_cross_entropy
from vitrefine.train.distillation import DistillationLoss
from vitrefine.train.output import logits_of
from vitrefine.train.recipe import Recipe
from vitrefine.train.teacher import open_teacher
from vitrefine.train.token_labels import TokenLabelLoss

LOSSES = {"ce": soft_cross_entropy, "bce": binary_cross_entropy}


class ClassLoss(nn.Module):
    """A loss of the logits of images alone."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compare = compare

    def forward(self, output: Any, images: Tensor, targets: Tensor) -> Tensor:
        return self.compare(logits_of(output), targets)


class Objective(nn.Module):
    """The mean loss of a batch, in single precision at least; it has no parameter that learns.

    Args:
        loss: Takes what the model returned, images and soft targets.
        distil: Switches a model with a distillation token to return both of its predictions, and back.
    """

    def __init__(self, loss: nn.Module, distil: Callable[[bool], None] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.distil = distil

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        # Switched for this pass alone: at any other time the model is the one that its spec describes.
        if self.distil:
            self.distil(True)
        try:
            output = model(batch.images)
        finally:
            if self.distil:
                self.distil(False)
        return self.loss(output, batch.images, batch.targets)


def build_objective(
    recipe: Recipe,
    model: nn.Module,
    classes: int,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: torch.device | str | None = None,
) -> Objective:
    """The objective of a recipe for a model.

    Args:
        recipe: Its `loss` counts.
        model: The model itself, before anything wraps it.
        classes: Of the data.
        mean, std: What the images are normalised with.
        device: Where a teacher goes.
    """
    options = recipe.loss
    prepared: dict[str, Any] = {"mean": mean, "std": std, "device": device}
    if options.token_labels:
        _check_token_labels(model, options.token_labels.mix)
        name = options.token_labels.teacher
        labeller = open_teacher(name, classes, **prepared) if name else None
        return Objective(TokenLabelLoss(options.token_labels.weight, labeller))
    if getattr(model, "aux_head", None) is not None:
        raise UserError(
            f"{type(model).__name__} was made with token_labels=true, but the recipe has no token labels to teach it; "
            "set loss.token_labels.weight=0.5, or leave token_labels out of the spec"
        )
    if options.distillation:
        teacher = open_teacher(options.distillation.teacher, classes, **prepared)
        return Objective(
            DistillationLoss(options.distillation, teacher), getattr(model, "set_distilled_training", None)
        )
    return Objective(ClassLoss(LOSSES[options.kind]))


def _check_token_labels(model: nn.Module, mix: bool) -> None:
    if getattr(model, "aux_head", None) is None:
        raise UserError(
            f"loss.token_labels needs a classifier of patches, which {type(model).__name__} has not; "
            "take refined_vit_s(token_labels=true) or another Refined-ViT"
        )
    if getattr(model, "mix_token", False) != mix:
        has = str(not mix).lower()
        raise UserError(f"the model was made with mix_token={has}, but loss.token_labels.mix is {str(mix).lower()}")
