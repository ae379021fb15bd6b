"""Models from specs, and specs from models.

A model remembers what it was made from and what was done to it. Before that memory is passed on, to a reader or to a
checkpoint, it is put to the test: the spec is built again without storage, and must come out as the same model.
"""

import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from timm.layers import DropPath
from timm.utils.model import unwrap_model
from torch import nn

from vitrefine.errors import UserError
from vitrefine.models.meta import meta_copy
from vitrefine.surgery.base import build
from vitrefine.surgery.graft import RECORD, Surgery, lineage, strip, surgery_of
from vitrefine.surgery.operate import Report, apply
from vitrefine.surgery.registry import canonicalise
from vitrefine.surgery.spec import Call, Spec, freeze, parse

# Arguments that say where weights come from, which is no part of what a model is.
SOURCES = frozenset(
    {
        "pretrained",
        "weights",
        "weights_backbone",
        "cache_dir",
        "checkpoint_path",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
    }
)

# Attributes that may differ between two builds of one model: how it is trained, what computes it, where it came from;
# and the shift of Swin's windows, which transformers' sets anew whenever it runs.
INCIDENTAL = frozenset(
    {"training", "p", "drop_prob", "drop_rate", "grad_checkpointing", "fused_attn", "name_or_path", "shift_size"}
)


def create(spec: str | Spec, **kwargs: Any) -> nn.Module:
    """The model that a spec describes.

    Args:
        spec: `"vit_small_patch16_224+refiner(expansion=3)+cb"`.
        kwargs: Arguments of the base besides those in its brackets: `num_classes=10`, `img_size=32`. They become part
            of the model's spec, except for `pretrained=True` and others that only say where weights come from.
    """
    return rebuild(spec, None, **kwargs)


def rebuild(spec: str | Spec, config: Mapping[str, Any] | None, **kwargs: Any) -> nn.Module:
    """As `create`; where the base is of transformers, its configuration may be given instead of fetched."""
    spec = canonicalise(parse(spec) if isinstance(spec, str) else spec)
    arguments = {**spec.base.args, **kwargs}
    for name in arguments.keys() - SOURCES:
        try:
            freeze(arguments[name])
        except UserError as error:
            raise UserError(f"{name} cannot be an argument of {spec.base.name} here: {error}") from error
    base = Call(spec.base.name, {name: value for name, value in arguments.items() if name not in SOURCES})
    sources = {name: value for name, value in arguments.items() if name in SOURCES}
    model = build(base, **sources) if config is None else _configured(base, config)
    surgery_of(model).base = base
    for call in spec.modifications:
        apply(model, call)
    return model


def _configured(base: Call, config: Mapping[str, Any]) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = build(Call(f"hf:{folder}", base.args))
    labelled: list[Any] = [module for module in model.modules() if hasattr(module, "name_or_path")]
    for module in labelled:
        module.name_or_path = module.config.name_or_path = Spec(base).model
    return model


def config_of(model: Any, spec: Spec) -> dict[str, Any] | None:
    """The configuration of a model of transformers, which `rebuild` takes; None for any other model."""
    if spec.library != "hf":
        return None
    return {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [_kind(model)]}


def report_of(model: nn.Module) -> Report:
    """Everything that was done to a model so far."""
    model = unwrap_model(model)
    record = _record(model)
    original = strip(meta_copy(model))
    added = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in original.parameters())
    return Report(tuple(record.modifications), tuple(record.changes), added)


def spec_of(model: nn.Module) -> Spec:
    """The spec from which `create` makes a model like this one, weights aside.

    A model of timm's that `create` did not make has one too: its architecture, and the arguments that can be read off.
    """
    model = unwrap_model(model)
    record = _record(model)
    base = record.base or _architecture(model)
    if Spec(base).library == "hf_hub":
        # It names weights; the architecture is timm's own, and to build that needs no network.
        base = Call(_architecture(model).name, base.args)
    spec = Spec(base, tuple(record.modifications))
    twin = _twin(spec, model)
    difference = _difference(model, twin)
    if difference:
        # The head may have been exchanged, or an argument given to timm itself.
        spec = Spec(Call(base.name, {**base.args, **_arguments(model, twin)}), spec.modifications)
        difference = _difference(model, _twin(spec, model))
    if difference:
        raise UserError(_unknown(model, difference, spec.base))
    return spec


def _record(model: nn.Module) -> Surgery:
    """What was done to a model, without leaving a trace on one to which nothing was done."""
    record: Surgery = vars(model).get(RECORD) or Surgery()
    return record


def _unknown(model: nn.Module, why: str, base: Call | None) -> str:
    made = "was changed since" if _record(model).base else "was not made by"
    name = f'"{base}"' if base else "a spec"
    return (
        f"{_kind(model)} {made} vitrefine.create, and {why}; "
        f"create it with vitrefine.create({name}, …), with the arguments that it needs"
    )


def _kind(module: nn.Module) -> str:
    return lineage(type(module))[-1].__name__


def _architecture(model: nn.Module) -> Call:
    """The name that timm gave a model."""
    from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, is_model

    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    name, tag = config.get("architecture"), config.get("tag")
    if not isinstance(name, str) or not is_model(name):
        origin = getattr(getattr(model, "config", None), "name_or_path", "")
        base = Call(f"hf:{origin}") if origin else None
        raise UserError(_unknown(model, "only a model of timm's shows how it was made", base))
    usual = get_pretrained_cfg(name)
    tagged = f"{name}.{tag}" in get_arch_pretrained_cfgs(name) and usual is not None and tag != usual.tag
    return Call(f"{name}.{tag}" if tagged else name)


def _twin(spec: Spec, model: nn.Module) -> nn.Module:
    """The spec's model made anew, without storage where that can be; a few need values to be built or surveyed."""
    config = config_of(model, spec)
    try:
        with torch.device("meta"):
            return rebuild(spec, config)
    except UserError:
        return rebuild(spec, config)


def _image_size(model: nn.Module) -> Any:
    sizes = [m.img_size for m in model.modules() if isinstance(getattr(m, "img_size", None), int | tuple)]
    size = sizes[0] if sizes else None
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 else size


def _channels(model: Any) -> int:
    if hasattr(model, "in_chans"):
        return model.in_chans
    first = model.pretrained_cfg["first_conv"]
    return model.get_submodule(first if isinstance(first, str) else first[0]).in_channels


def _drop_path_rate(model: nn.Module) -> float:
    # Rates rise from block to block, in single precision.
    return round(max((m.drop_prob or 0.0 for m in model.modules() if isinstance(m, DropPath)), default=0.0), 6)


READERS: dict[str, Callable[[Any], Any]] = {
    "img_size": _image_size,
    "in_chans": _channels,
    "drop_path_rate": _drop_path_rate,
}


def _arguments(model: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """Arguments of its class that a model still shows, where they are not those of its twin."""
    arguments = {}
    for name in _parameters(lineage(type(model))[-1]):
        read = READERS.get(name, lambda owner, name=name: getattr(owner, name))
        try:
            value = freeze(read(model))
            differs = value != freeze(read(twin))
        except (AttributeError, KeyError, TypeError, UserError):  # it is not kept, or is nothing that a spec can say
            continue
        if differs:
            arguments[name] = value
    return arguments


def _parameters(kind: type) -> dict[str, None]:
    """The arguments of a class; where it passes the rest on to its parent, that one's too."""
    names: dict[str, None] = {}
    for owner in kind.__mro__:
        if "__init__" in vars(owner):
            parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
            names |= dict.fromkeys(p.name for p in parameters)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


def _difference(model: nn.Module, twin: nn.Module) -> str:
    """The first thing in which two models are not alike, in words; empty if they are."""
    mine, its = model.state_dict(), twin.state_dict()
    for name in [*mine, *its]:
        if name not in its:
            return f"{name} is a weight that {_kind(twin)} has not"
        if name not in mine:
            return f"it has no {name}"
        if mine[name].shape != its[name].shape:
            return f"its {name} is {_size(mine[name])}, not {_size(its[name])}"
    for name, module in model.named_modules():
        try:
            other = twin.get_submodule(name)
        except AttributeError:
            return f"{name} is a part that it should not have"
        if lineage(type(module)) != lineage(type(other)):
            return f"its {name or 'class'} is a {_kind(module)}, not a {_kind(other)}"
        for attribute, value in _plain(module):
            expected = vars(other).get(attribute, value)
            if type(expected) is type(value) and expected != value:
                return f"its {name}.{attribute} is {value}, not {expected}".replace(" .", " ")
    return ""


def _size(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        items = value if isinstance(value, tuple) else (value,)
        if name[0] != "_" and name not in INCIDENTAL and all(isinstance(i, bool | int | float | str) for i in items):
            yield name, value
