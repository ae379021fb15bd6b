"""Whether all specs of a comparison can be trained, found out before any of them is."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

from vitrefine.data.dataset import DataSet
from vitrefine.errors import UserError
from vitrefine.models.cost import measure
from vitrefine.train.build import build_model, check_runs
from vitrefine.train.fit import Fit, fit
from vitrefine.train.objective import build_objective
from vitrefine.train.recipe import Recipe
from vitrefine.train.teacher import open_teacher


def check_specs(specs: Sequence[str], data: DataSet, recipe: Recipe, weights: str | None = None) -> None:
    """Raise a `UserError` that names the first spec that cannot be trained on the data with the recipe and weights."""
    loss = recipe.loss
    teacher = loss.distillation.teacher if loss.distillation else loss.token_labels and loss.token_labels.teacher
    if teacher:
        open_teacher(teacher, len(data.classes), mean=data.mean)
    alone = _without_teacher(recipe)  # which is the same for all specs, and large
    for spec in specs:
        try:
            _check(spec, data, alone, weights)
        except UserError as error:
            raise UserError(str(error) if spec in str(error) else f"{spec}: {error}") from error


def _without_teacher(recipe: Recipe) -> Recipe:
    labels = recipe.loss.token_labels
    update = {"distillation": None, "token_labels": labels and labels.model_copy(update={"teacher": None})}
    return recipe.model_copy(update={"loss": recipe.loss.model_copy(update=update)})


def _check(spec: str, data: DataSet, recipe: Recipe, weights: str | None) -> None:
    fitting = fit(spec, data, recipe, weights=weights, say=lambda _: None)
    model = _built(fitting, recipe, weights)
    build_objective(recipe, model, len(data.classes))
    try:
        measure(model, fitting.size, data.channels)
    except Exception:  # a few models run on values only
        check_runs(build_model(fitting, recipe, seed=0, weights=None)[0], fitting, data.channels)


def _built(fitting: Fit, recipe: Recipe, weights: str | None) -> nn.Module:
    if weights is None:
        with suppress(UserError), torch.device("meta"):
            return build_model(fitting, recipe, seed=0, weights=None)[0]
    return build_model(fitting, recipe, seed=0, weights=weights)[0]  # a few need values to be built
