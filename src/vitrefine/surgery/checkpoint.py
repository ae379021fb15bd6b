"""Checkpoints that know what they are: a file of weights, and in it the spec that rebuilds the model around them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine import __version__
from vitrefine.errors import UserError
from vitrefine.surgery.create import SOURCES, rebuild
from vitrefine.surgery.description import INPUT, describe
from vitrefine.surgery.graft import surgery_of
from vitrefine.surgery.hub import located
from vitrefine.surgery.spec import Call, Spec, parse
from vitrefine.surgery.weights import Info, State, read, write


def save(
    model: nn.Module,
    path: str | Path,
    *,
    input_config: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write a model to a file from which `load` rebuilds it with no other argument.

    Args:
        model: Any model that has a spec: one that `create` made, or timm.
        path: A file that ends in .safetensors.
        input_config: How its images are prepared, where that is not as its `pretrained_cfg` says.
        classes: The names of its classes.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path} has to end in .safetensors, for that is what it will hold")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into; create it first")
    model = unwrap_model(model)
    write(path, model.state_dict(), describe(model, input_config, classes))


def load(path: str | Path, *, device: str | torch.device = "cpu", **kwargs: Any) -> nn.Module:
    """The model in a file, ready to predict: with its modifications, its weights and in eval mode.

    Args:
        path: A file that `save` wrote, a folder that `save_folder` wrote, or `"hf-hub:owner/name"`.
        device: Where the model goes.
        kwargs: Arguments of the base to be changed, such as `drop_path_rate=0.1`; its weights must still fit.
    """
    if needless := sorted(kwargs.keys() & SOURCES):
        raise UserError(f"load takes no {needless[0]}, for the weights are in the file")
    return restored(path, *read(located(path)), **kwargs).to(device)


def restored(path: str | Path, state: State, info: Info, **kwargs: Any) -> nn.Module:
    """The model of what was read from a file; arguments as of `load`."""
    try:
        spec = parse(info["spec"])
        _check_harmless(spec.base)
        config = _harmless(info.get("config"))
        if spec.library == "hf_hub" or (spec.library == "hf" and not config):
            raise UserError(f"its spec names {spec.base.name} without what that is, which no saved spec does")
        model = _rebuilt(spec, config, kwargs, state)
    except UserError as error:
        version = info.get("version")
        by = "" if version == __version__ else f" (vitrefine {version} wrote it, this is {__version__})"
        raise UserError(f"{path} cannot be loaded: {error}{by}") from error
    _tie(model, info.get("tied", {}))
    _equip(model, info)
    return model.eval()


def _check_harmless(base: Call) -> None:
    """A spec in a file that someone else wrote may say what a model is, not fetch or run anything."""
    for name, value in base.args.items():
        if name in SOURCES or name == "trust_remote_code" or (name == "attn_implementation" and "/" in str(value)):
            raise UserError(f"its spec gives {name}={value}, which no saved spec does")


def _harmless(config: Any) -> Any:
    """A configuration without what may name code on the Hub: whose kernels compute a model is no part of it."""
    if isinstance(config, dict):
        kept = {name: value for name, value in config.items() if not name.endswith(("implementation", "auto_map"))}
        return {name: _harmless(value) for name, value in kept.items()}
    return config


def _rebuilt(spec: Spec, config: Info | None, arguments: dict[str, Any], state: State) -> nn.Module:
    """The spec's model with the weights in it; no time is spent on initial values where it can be built without."""
    try:
        with torch.device("meta"):
            model = rebuild(spec, config, **arguments)
    except UserError:  # it may be that values are needed to build it
        model = rebuild(spec, config, **arguments)
    _fill(model, state)
    if any(_without_values(vars(module)) for module in model.modules()):
        # Tables that are computed when a model is built and are in no checkpoint.
        model = rebuild(spec, config, **arguments)
        _fill(model, state)
    _empty_what_was_replaced(model)
    return model


def _empty_what_was_replaced(model: nn.Module) -> None:
    """Parts in whose place surgery put others are in no checkpoint: `strip` must not bring back initial values."""
    live = set(model.parameters())
    for kind, _, rest in surgery_of(model).undo:
        if kind == "replace" and live.isdisjoint(rest[1].parameters()):
            rest[1].to("meta")


def _without_values(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_without_values, items))


def _fill(model: nn.Module, state: State) -> None:
    expected = model.state_dict()
    extra = [name for name in state if name not in expected]
    missing = [name for name in expected if name not in state]
    both = [(name, state[name], expected[name]) for name in state if name in expected]
    misshapen = [name for name, mine, its in both if mine.shape != its.shape]
    untyped = [name for name, mine, its in both if mine.is_floating_point() != its.is_floating_point()]
    wrong = [("too many", extra), ("missing", missing), ("of another shape", misshapen), ("of another type", untyped)]
    if any(names for _, names in wrong):
        listed = "; ".join(f"{what}: {_some(names)}" for what, names in wrong if names)
        raise UserError(f"its weights do not fit its spec ({listed})")
    model.load_state_dict(state, assign=True)
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(kinds) == 1:  # tables that are in no checkpoint follow the weights, as under `model.half()`
        (dtype,) = kinds
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    for name, kept in tied.items():
        (owner, _, leaf), (other, _, original) = name.rpartition("."), kept.rpartition(".")
        setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(other), original))


def _equip(model: Any, info: Info) -> None:
    """How images are prepared, and what the classes are called, where timm's tools look for it."""
    found = {name: value for name, value in info.get("input", {}).items() if name in INPUT}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    if "classes" in info:
        found["label_names"] = tuple(info["classes"])
    if found:
        model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **found}
