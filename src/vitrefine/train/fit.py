"""A model fitted to a data set: as many classes and channels, images of its size, and patches small enough for them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import nn

from vitrefine.data.dataset import DataSet
from vitrefine.errors import UserError
from vitrefine.surgery.base import NAMES, build
from vitrefine.surgery.hub import located
from vitrefine.surgery.inputs import example_inputs
from vitrefine.surgery.registry import canonicalise
from vitrefine.surgery.spec import Call, Spec, parse
from vitrefine.surgery.weights import read_info
from vitrefine.train.recipe import Recipe

Size = tuple[int, int]

PRETRAINED = "pretrained"  # weights that a model's library has for it

_log = logging.getLogger(__name__)

LEAST_GRID = 8  # patches to a side: with fewer there is little to attend to
TRAINING_ONLY = ("drop_path_rate", "drop_rate")  # no part of what a model is


@dataclass(frozen=True)
class Fit:
    """A spec with all arguments that the data calls for, and the size of the images to give to its model."""

    spec: Spec
    size: Size


def fit(
    spec: str | Spec,
    data: DataSet,
    recipe: Recipe,
    *,
    weights: str | None = None,
    say: Callable[[str], None] = _log.info,
) -> Fit:
    """Fit a spec to a data set. What stands in the brackets of its base is left as it is.

    Args:
        spec: The model.
        data: Where classes, channels and size come from.
        recipe: Its `data.size` goes before the set's own size; its loss may call for a head of its own.
        weights: As in `Job`. With some, patches are theirs, where their file says of what model they are, else the
            model's own.
        say: Told in one sentence when the patches are made smaller.
    """
    spec = canonicalise(parse(spec) if isinstance(spec, str) else spec)
    classes, channels, size_name = NAMES[spec.library]
    given = dict(spec.base.args)
    if weights is not None and "patch_size" not in given:
        given |= _patches_of(weights, spec.base.name)
    if given.get(classes, len(data.classes)) != len(data.classes):
        raise UserError(f"{spec} has {given[classes]} classes, but {data.name} has {len(data.classes)}; leave them out")
    wanted: dict[str, Any] = {classes: len(data.classes)} | ({channels: data.channels} if data.channels != 3 else {})
    base = Call(spec.base.name, wanted | given)
    size = recipe.data.size or data.size
    if size_name in given or size is None:
        model = _shadow(base)
    else:
        base, model = _sized(base, size_name, (size, size) if isinstance(size, int) else size)
    # A model that takes any size does not show the one that is asked for.
    own = _pair(given[size_name]) if size_name in given else _pair(size or _own_size(model))
    if weights is None and "patch_size" not in given:
        base = _with_small_patches(base, model, own, say)
    if recipe.loss.token_labels:
        if not hasattr(model, "aux_head"):
            wrong = f"loss.token_labels needs a classifier of patches, which {spec} cannot have"
            raise UserError(f"{wrong}; take refined_vit_s or another Refined-ViT, or set loss.token_labels=null")
        labels = {name: value for name, value in recipe.model_arguments().items() if name not in TRAINING_ONLY}
        base = Call(base.name, labels | dict(base.args))
    return Fit(Spec(base, spec.modifications), own)


def fitted(spec: str | Spec, data: DataSet, recipe: Recipe) -> Spec:
    """The spec of `fit`."""
    return fit(spec, data, recipe).spec


def _patches_of(weights: str, name: str) -> dict[str, Any]:
    """The argument for the patches that a file's weights were made with, if they are of a model of this name."""
    info = None if weights == PRETRAINED else read_info(located(weights))
    said = parse(info["spec"]).base if info else None
    if said is None or said.name != name or "patch_size" not in said.args:
        return {}
    return {"patch_size": said.args["patch_size"]}


def _shadow(base: Call) -> nn.Module:
    """The base without storage, where it can be built so."""
    try:
        with torch.device("meta"):
            return build(base)
    except UserError:
        return build(base)


def _sized(base: Call, size_name: str, size: Size) -> tuple[Call, nn.Module]:
    model: nn.Module | None = None
    try:
        model = _shadow(base)
        if _own_size(model) == size and _shows_its_size(model):
            return base, model
    except UserError:
        pass  # its own size may be at odds with other arguments, such as patches that do not fill it
    sized = Call(base.name, {**base.args, size_name: size[0] if size[0] == size[1] else size})
    try:
        return sized, _shadow(sized)
    except UserError as error:
        if model is None or size_name not in str(error):
            raise
        return base, model  # it takes images of any size


def _shows_its_size(model: nn.Module) -> bool:
    return isinstance(getattr(model, "patch_embed", None), PatchEmbed)


def _own_size(model: nn.Module) -> Size:
    return _pair(next(tuple(x.shape[-2:]) for x in example_inputs(model).values() if x.ndim == 4))


def _pair(size: Any) -> Size:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _with_small_patches(base: Call, model: nn.Module, size: Size, say: Callable[[str], None]) -> Call:
    embedding = getattr(model, "patch_embed", None)
    if not isinstance(embedding, PatchEmbed):
        return base
    patch = max(embedding.patch_size)
    if min(size) // patch >= LEAST_GRID:
        return base
    fitting = [p for p in range(1, patch) if all(side % p == 0 and side // p >= LEAST_GRID for side in size)]
    if not fitting:
        return base
    smaller = Call(base.name, {**base.args, "patch_size": fitting[-1]})
    try:
        _shadow(smaller)
    except UserError:
        return base  # its patches are what they are
    few = f"{size[0] // patch}x{size[1] // patch}"
    say(f"{base.name} cuts images of {size[0]}x{size[1]} into {few} patches; patch_size={fitting[-1]} is used instead")
    return smaller
