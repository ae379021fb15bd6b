"""What a checkpoint says of a model besides its weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vitrefine.errors import UserError
from vitrefine.surgery.create import config_of, spec_of
from vitrefine.surgery.inputs import example_inputs
from vitrefine.surgery.registry import get
from vitrefine.surgery.spec import Call, Spec
from vitrefine.surgery.weights import Info

INPUT = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")


def describe(
    model: nn.Module, input_config: Mapping[str, Any] | None = None, classes: Sequence[str] | None = None
) -> Info:
    """The spec with every option spelled out, how images are prepared, the classes; as `weights.py` lists them."""
    spec, config = spec_of(model), getattr(model, "pretrained_cfg", None) or {}
    known = {name: config[name] for name in INPUT if config.get(name) is not None}
    images = (known | {"input_size": size} if (size := _input_size(model, spec)) else {}) | dict(input_config or {})
    if unknown := sorted(images.keys() - set(INPUT)):
        raise UserError(f"an input configuration has no {unknown[0]}; it has {', '.join(INPUT)}")
    named = _class_names(model, classes, config.get("label_names"))
    explicit = Spec(spec.base, tuple(_spelled_out(call) for call in spec.modifications))
    optional = {"classes": named, "config": config_of(model, spec)}
    return {"spec": str(explicit), "input": images} | {name: value for name, value in optional.items() if value}


def _class_names(model: nn.Module, given: Sequence[str] | None, known: Sequence[str] | None) -> list[str] | None:
    """The names that were given; else those that a checkpoint had, unless the classifier was exchanged since."""
    names = list(given or known or ())
    count = getattr(model, "num_classes", len(names))
    if given and len(names) != count:
        raise UserError(f"{len(names)} names cannot be those of a model of {count} classes; give one for each class")
    return names if len(names) == count else None


def _input_size(model: nn.Module, spec: Spec) -> list[int] | None:
    """Channels, height and width of the images that a model was made for; None if it takes no images."""
    given = next((x.shape[1:] for x in example_inputs(model).values() if x.ndim == 4), None)
    if given is None:
        return None
    size: Any = spec.base.args.get("img_size", tuple(given[1:]))  # not every model shows its size
    return [given[0], *((size, size) if isinstance(size, int) else size)]


def _spelled_out(call: Call) -> Call:
    defaults = {name: option.default for name, option in get(call.name).options.items()}
    return Call(call.name, {**defaults, **call.args})
