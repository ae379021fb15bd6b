"""The model that a run starts from."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.data.dataset import DataSet
from vitrefine.errors import UserError
from vitrefine.surgery.checkpoint import restored
from vitrefine.surgery.create import create
from vitrefine.surgery.hub import located
from vitrefine.surgery.inputs import normalisation
from vitrefine.surgery.weights import read_any
from vitrefine.train.fit import PRETRAINED, TRAINING_ONLY, Fit
from vitrefine.train.output import logits_of
from vitrefine.train.recipe import Recipe


def build_model(fit: Fit, recipe: Recipe, seed: int, weights: str | None) -> tuple[nn.Module, str | None]:
    """The model, and a sentence on the weights that it starts with; None where it starts from scratch.

    Args:
        fit: What to build.
        recipe: Its drop rates are the model's while it trains, unless its spec says others.
        seed: Of the initial weights.
        weights: As in `Job`.
    """
    rates = {name: value for name, value in recipe.model_arguments().items() if name in TRAINING_ONLY}
    arguments: dict[str, Any] = {name: value for name, value in rates.items() if name not in fit.spec.base.args}
    if weights == PRETRAINED:
        arguments[PRETRAINED] = True
    torch.manual_seed(seed)
    try:
        model = create(fit.spec, **arguments)
    except UserError as error:
        refused = next((name for name in rates if re.search(rf"(argument|has no) {name}\b", str(error))), None)
        if refused is None:
            raise
        key = {"drop_path_rate": "model.drop_path", "drop_rate": "model.drop"}[refused]
        raise UserError(f"{error}; train it with --set {key}=null") from error
    if weights in (None, PRETRAINED):
        return model, weights and "started from the weights that the model's library has for it"
    return model, _start_from(model, str(weights), fit)


def _start_from(model: nn.Module, path: str, fit: Fit) -> str:
    """Take over weights by name; what is not there, and what there is one of for each class, is learnt anew."""
    state, source = model.state_dict(), _source(path, model, fit)
    taken: dict[str, Tensor] = {}
    for name, tensor in source.items():
        if name not in state:
            continue
        if tensor.shape == state[name].shape:
            taken[name] = tensor
        elif tensor.ndim != state[name].ndim or tensor.shape[1:] != state[name].shape[1:] or "pos" in name:
            shapes = f"{tuple(tensor.shape)}, not {tuple(state[name].shape)}"
            raise UserError(f"{path} does not fit {fit.spec}: its {name} is {shapes}; take a model of the same shape")
    if not taken:
        raise UserError(f"{path} has no weight in common with {fit.spec}; start from a model of the same kind")
    model.load_state_dict(taken, strict=False)
    new = [name for name in state if name not in taken]
    return f"started from {path}: {len(taken)} of {len(state)} weights; new: {', '.join(new) or 'none'}"


def _source(path: str, model: Any, fit: Fit) -> dict[str, Tensor]:
    """The weights in a checkpoint; where it says what its model is, position embeddings are resized.

    What that says of images counts for `model`, too.
    """
    weights, info = read_any(located(path))
    if info is None:
        return weights
    source: Any = restored(path, weights, info)
    said, own = (getattr(each, "pretrained_cfg", None) or {} for each in (source, model))
    model.pretrained_cfg = {**own, **{name: said[name] for name in ("mean", "std") if name in said}}
    if hasattr(source, "set_input_size"):
        source.set_input_size(img_size=fit.size)
    state: dict[str, Tensor] = source.state_dict()
    return state


def check_runs(model: nn.Module, fit: Fit, channels: int) -> None:
    """Refuse a model that cannot take the images that it was fitted to, by one forward pass; leaves it in eval mode."""
    try:
        with torch.no_grad():
            logits_of(model.eval()(torch.zeros(2, channels, *fit.size)))
    except UserError:
        raise
    except Exception as error:
        size = f"{fit.size[0]}x{fit.size[1]}"
        raise UserError(f"{fit.spec} cannot take images of {size} ({error}); change data.size or the model") from error


def normalise_for(model: nn.Module, data: DataSet) -> None:
    """Give images the mean and deviation that a model with weights is used to, where it says which."""
    if used := normalisation(model, data.channels):
        data.mean, data.std = used
