"""The groups of a recipe: optimiser, schedule, model and loss; `recipe.py` puts them together."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vitrefine.train.nearest import nearest

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=2**31)]

# Optimisers of timm that no run can be made with, and why.
_UNFIT = {
    "adahessian": "needs second derivatives",
    **dict.fromkeys(
        ("adafactorbv", "adafactorbvc", "cadafactorbv", "cadafactorbvc", "madgrad", "madgradw"),
        "cannot be continued from a checkpoint",
    ),
}


class Conflict(ValueError):
    """Settings that do not go together.

    Args:
        sentence: What is wrong and what to do, in words that name the settings.
        keys: Those settings, as in `schedule.warmup_epochs`; the one most likely wrong comes first.
    """

    def __init__(self, sentence: str, *keys: str) -> None:
        super().__init__(sentence)
        self.keys = keys


class Group(BaseModel):
    """Settings that know all their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Optim(Group):
    """The optimiser, by timm's name for it; what is null is as that optimiser has it."""

    name: str = "adamw"
    lr: Positive
    """Highest learning rate."""
    lr_batch: Count | None = None
    """The batch that `lr` is for: another batch gets lr · batch / lr_batch. Null: `lr` for any batch."""
    weight_decay: NotNegative = 0.05
    betas: tuple[Rate, ...] | None = None
    eps: Positive | None = None
    momentum: Rate | None = None
    clip_grad: Positive | None = None
    """Greatest norm of the gradient of all parameters together."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of the learning rate from each layer to the one below it."""
    offset_lr_ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of the learning rate for the offsets of deformable token merging, as in LIT; 1: as all others."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from timm.optim import list_optimizers

        known = [str(optimiser) for optimiser in list_optimizers()]
        if name not in known:
            near = nearest(name, known)
            raise ValueError(f"timm has no optimiser {name!r}; {f'did you mean {near}?' if near else 'take adamw'}")
        if name in _UNFIT:
            raise ValueError(f"{name} {_UNFIT[name]}; take adamw or another one")
        return name

    def arguments(self) -> dict[str, Any]:
        """What is said about the optimiser's own arguments."""
        said = {"betas": self.betas, "eps": self.eps, "momentum": self.momentum}
        return {name: value for name, value in said.items() if value is not None}


class Schedule(Group):
    """Learning rates: up in a line, down in half a cosine, then flat; from update to update."""

    warmup_epochs: NotNegative = 5
    warmup_lr: NotNegative = 1e-6
    """Where the line starts."""
    min_lr: NotNegative = 1e-5
    """Where the cosine ends."""
    cooldown_epochs: Annotated[int, Field(ge=0)] = 0
    """The last of the epochs, spent at `min_lr`."""


class ModelOptions(Group):
    """Arguments of the model; null: as the model has it, so that any model can be trained."""

    drop_path: Rate | None = None
    """Stochastic depth of the last block; that of the others grows to it in a line."""
    drop: Rate | None = None
    """Dropout before the classifier."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a running mean of the weights, which is what is tested and saved then; null: no such mean."""


class TokenLabels(Group):
    """A label for every patch beside that of the image (token labelling)."""

    weight: Positive = 0.5
    """Of the patches' loss beside the image's."""
    mix: bool = True
    """Mix-token: swap a box of patches between images, and their labels with them."""
    teacher: str | None = None
    """A spec or checkpoint whose feature map is classified place by place; null: each patch has its image's label."""


class Distillation(Group):
    """Learning from another model's predictions (DeiT)."""

    teacher: str
    """A spec with pretrained weights, or a checkpoint."""
    kind: Literal["hard", "soft"] = "hard"
    """`hard`: the class that the teacher ranks first; `soft`: all of its probabilities."""
    alpha: Share = 0.5
    """Share of the loss that the teacher has."""
    temperature: Positive = 1.0
    """Of both models' probabilities; for `soft`."""


class LossOptions(Group):
    """What is made small."""

    kind: Literal["ce", "bce"] = "ce"
    """Cross-entropy over classes, or a binary one for each class by itself."""
    token_labels: TokenLabels | None = None
    distillation: Distillation | None = None
