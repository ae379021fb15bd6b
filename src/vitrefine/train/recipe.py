"""Recipes: all that is decided about a training run besides model, data and seed, as YAML that people read and write.

    epochs: 300
    batch: 1024
    optim: {lr: 1e-3, lr_batch: 1024}

`load_recipe("deit", ["optim.lr=5e-4"])` takes a shipped recipe or a file, puts overrides on top and checks it all.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import ValidationError, model_validator

from vitrefine.data.options import Augment, DataOptions
from vitrefine.errors import UserError
from vitrefine.train.complaint import complaint
from vitrefine.train.document import Document, read_document, read_override
from vitrefine.train.nearest import nearest
from vitrefine.train.options import Conflict, Count, Group, LossOptions, ModelOptions, Optim, Schedule


class Recipe(Group):
    """How to train; `load_recipe` makes one from YAML."""

    epochs: Count
    """All of them, those of the cool-down too."""
    batch: Count
    """Images an update, over all processes and accumulation steps."""
    accumulate: Count = 1
    """Steps whose gradients make one update."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 where the device computes in it fast, else fp32."""
    compile: Literal[True, False, "auto"] = "auto"
    """`auto`: on a GPU, and as CUDA graphs where there is one process and one step an update."""
    deterministic: bool = False
    """Only kernels that give the same bits each time."""
    test_epochs: Count | None = 1
    """Test every so many epochs, and after the last; null: after the last alone."""
    checkpoint_epochs: Count = 1
    """A checkpoint every so many epochs,"""
    checkpoint_steps: Count | None = None
    """and every so many updates within one."""
    keep_checkpoints: Count = 2
    log_every: Count = 50
    """Updates between two lines of the log."""
    stall_epochs: Count | None = 50
    """Stop when the training loss has had no new minimum for so many epochs; null: never."""
    optim: Optim
    schedule: Schedule = Schedule()
    data: DataOptions = DataOptions()
    augment: Augment = Augment()
    model: ModelOptions = ModelOptions()
    loss: LossOptions = LossOptions()

    @property
    def lr(self) -> float:
        """The highest learning rate, for the batch as it is."""
        return self.optim.lr * (self.batch / self.optim.lr_batch if self.optim.lr_batch else 1)

    def per_process(self, world: int) -> int:
        """Images that each of `world` processes takes at a time."""
        images, rest = divmod(self.batch, self.accumulate * world)
        if rest:
            steps = f" times accumulate={self.accumulate}" if self.accumulate > 1 else ""
            raise UserError(f"batch={self.batch} cannot be dealt out to {world} processes{steps}; take a multiple")
        if images == 1 and self.mixes:
            raise UserError(f"mixup and cutmix mix two images, but {world} processes take one each; enlarge the batch")
        return images

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, which takes two of them at a time."""
        return self.augment.mix_probability > 0 and (self.augment.mixup > 0 or self.augment.cutmix > 0)

    def model_arguments(self) -> dict[str, Any]:
        """What the recipe asks of the model, as arguments of `create`."""
        said = {"drop_path_rate": self.model.drop_path, "drop_rate": self.model.drop}
        arguments: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        if self.loss.token_labels:
            arguments |= {"token_labels": True, "mix_token": self.loss.token_labels.mix}
        return arguments

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._check_batch()
        self._check_schedule()
        self._check_optimizer()
        self._check_loss()
        return self

    def _check_batch(self) -> None:
        batch, accumulate, augment = self.batch, self.accumulate, self.augment
        if batch % accumulate:
            wrong = f"batch={batch} is not divisible by accumulate={accumulate}; change one of them"
            raise Conflict(wrong, "accumulate", "batch")
        if batch == accumulate and self.mixes:
            wrong = "mixup and cutmix mix two images, but a step has only one; take a larger batch"
            raise Conflict(f"{wrong} or a smaller accumulate", "accumulate", "batch")
        if augment.repeats > batch:
            wrong = f"augment.repeats={augment.repeats} is more than batch={batch}; lower it"
            raise Conflict(wrong, "augment.repeats", "batch")

    def _check_schedule(self) -> None:
        plan = self.schedule
        if plan.warmup_epochs + plan.cooldown_epochs >= self.epochs:
            keys = ("schedule.warmup_epochs", "schedule.cooldown_epochs")
            said = f"{keys[0]}={plan.warmup_epochs:g} and {keys[1]}={plan.cooldown_epochs}"
            raise Conflict(f"{said} leave nothing of epochs={self.epochs}; lower them or train longer", *keys, "epochs")
        for key, low in (("schedule.min_lr", plan.min_lr), ("schedule.warmup_lr", plan.warmup_lr)):
            if low > self.lr:
                how = " (optim.lr · batch / optim.lr_batch)" if self.optim.lr_batch else ""
                wrong = f"{key}={low:g} is above the learning rate {self.lr:g}{how}; lower it"
                raise Conflict(wrong, key, "optim.lr", "batch", "optim.lr_batch")

    def _check_optimizer(self) -> None:
        from timm.optim import get_optimizer_info

        optim, has = self.optim, get_optimizer_info(self.optim.name)
        for argument in optim.arguments():
            if not getattr(has, f"has_{argument}"):
                key = f"optim.{argument}"
                raise Conflict(f"{key} is nothing that {optim.name} has; make it null", key, "optim.name")
        if optim.betas is not None and len(optim.betas) != has.num_betas:
            raise Conflict(f"optim.betas must be {has.num_betas} numbers for {optim.name}", "optim.betas", "optim.name")

    def _check_loss(self) -> None:
        labels, distillation = self.loss.token_labels, self.loss.distillation
        if labels and distillation:
            wrong = "loss.token_labels and loss.distillation do not go together; make one of them null"
            raise Conflict(wrong, "loss.distillation", "loss.token_labels")
        if distillation and distillation.kind == "hard" and distillation.temperature != 1:
            key = "loss.distillation.temperature"
            raise Conflict(f"{key} has no effect where loss.distillation.kind is hard; leave it out", key)
        if self.loss.kind == "bce" and (labels or distillation):
            other = "loss.token_labels" if labels else "loss.distillation"
            raise Conflict(f"{other} is defined with cross-entropy; set loss.kind to ce", "loss.kind", other)


def _shipped() -> dict[str, Traversable]:
    folder = files("vitrefine") / "recipes"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def recipe_names() -> list[str]:
    """The recipes that come with vitrefine."""
    return sorted(_shipped())


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe, checked.

    Args:
        name_or_path: One of `recipe_names()`, or a YAML file.
        overrides: Settings on top of it, each as `optim.lr=1e-3`; values are YAML.
    """
    document = _read(str(name_or_path), beside=Path(), extended=())
    for text in overrides:
        document = document | read_override(text)
    try:
        return Recipe.model_validate_json(json.dumps(document.settings), strict=True)
    except ValidationError as error:
        raise UserError(complaint(error, document, Recipe)) from None


def _read(name: str, beside: Path, extended: tuple[str, ...]) -> Document:
    """A recipe on top of the one that it extends."""
    shipped = _shipped()
    file: Path | Traversable = shipped[name] if name in shipped else beside / name
    if os.path.realpath(str(file)) in map(os.path.realpath, extended):
        raise UserError(f"{extended[-1]} extends {name}, which extends it in turn; end the circle")
    if name not in shipped and not os.path.isfile(str(file)):  # which is False, too, for what can be no file's name
        among = nearest(name, shipped)
        asked = f"{extended[-1]} extends what is not there: " if extended else ""
        raise UserError(
            f"{asked}there is no recipe {name!r}{f', but {among}' if among else ''}; "
            f"give a YAML file or one of {', '.join(recipe_names())}"
        )
    document = read_document(file, f"recipe {name}" if name in shipped else str(file))
    base = document.settings.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise UserError(f"{document.where(('extends',))}: extends must be the name of one recipe, not {base!r}")
    lower = _read(base, Path(str(file)).parent, (*extended, str(file)))
    return replace(lower | document, origin=document.origin)


def dump_recipe(recipe: Recipe) -> str:
    """All settings of a recipe as YAML, those that were left out too; `load_recipe` reads it."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
