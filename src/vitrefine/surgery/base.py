"""The base of a spec: a model of timm, of torchvision, or of Hugging Face, by its name.

    vit_small_patch16_224(img_size=32)   timm's, and the papers' of this package
    hf_hub:owner/name                    timm's again, its configuration and weights from the Hub
    hf:google/vit-base-patch16-224       of transformers, from the Hub or from a folder
    torchvision:vit_b_16

What stands in the brackets goes to the model's constructor, for `hf:` into its configuration. `pretrained=true` fetches
weights. Whatever goes wrong is one sentence.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vitrefine.errors import UserError
from vitrefine.files import user_path
from vitrefine.surgery.spec import Call, Range, Spec

# What each library calls the number of classes, that of channels, and the size of images.
NAMES = {
    "timm": ("num_classes", "in_chans", "img_size"),
    "hf_hub": ("num_classes", "in_chans", "img_size"),
    "hf": ("num_labels", "num_channels", "image_size"),
    "torchvision": ("num_classes", "in_chans", "image_size"),
}
UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
FIXED = re.compile(r"got multiple values for (?:keyword )?argument '(\w+)'")
# Errors that mean no connection, by name: they belong to libraries that need not be there.
UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "URLError", "TransportError", "ConnectionError"}
NOT_THERE = {"RepositoryNotFoundError", "HFValidationError", "GatedRepoError", "EntryNotFoundError"}


def build(base: Call, **overrides: Any) -> nn.Module:
    """The model that the base of a spec names, made anew.

    Args:
        base: Name and arguments.
        overrides: Arguments besides those in its brackets, and in their place where both are given.
    """
    spec = Spec(base)
    make = {"timm": _timm, "hf_hub": _hub, "hf": _transformers, "torchvision": _torchvision}[spec.library]
    arguments = {name: _plain(value) for name, value in spec.base.args.items()} | overrides
    try:
        return make(spec.model, arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(_sentence(spec.base, error)) from error


def _plain(value: Any) -> Any:
    """A value of a spec as a constructor takes it: ranges written out."""
    if isinstance(value, Range):
        return tuple(range(value.first, value.last + 1))
    if isinstance(value, tuple):
        return tuple(number for item in value for number in (_plain(item) if isinstance(item, Range) else (item,)))
    return value


def _timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    import vitrefine.models  # noqa: F401  (registers the papers' models)

    if not timm.is_model(name):
        raise UserError(f"there is no model {name!r}; {_did_you_mean(name, timm.list_models())}")
    architecture, _, tag = name.partition(".")
    if tag and name not in (known := timm.models.get_arch_pretrained_cfgs(architecture)):
        raise UserError(f"{architecture} has no weights {tag!r}; {_did_you_mean(name, list(known))}")
    return timm.create_model(name, **arguments)


def _hub(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(f"hf-hub:{name}", **arguments)


def _torchvision(name: str, arguments: dict[str, Any]) -> nn.Module:
    from torchvision.models import get_model, get_model_builder, list_models

    if name not in list_models():
        raise UserError(f"torchvision has no model {name!r}; {_did_you_mean(name, list_models())}")
    if arguments.pop("pretrained", False):
        arguments.setdefault("weights", "DEFAULT")
    elif "weights_backbone" in inspect.signature(get_model_builder(name)).parameters:
        arguments.setdefault("weights_backbone", None)  # it would fetch some, though none were asked for
    return get_model(name, **arguments)


def _transformers(name: str, arguments: dict[str, Any]) -> nn.Module:
    transformers = _import("transformers", "nlp")
    pretrained = arguments.pop("pretrained", False)
    folder = user_path(name)
    if not folder.is_dir() and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise UserError(f"there is no folder {name}; hf: takes a folder that holds a config.json, or an id of the Hub")
    source = str(folder) if folder.is_dir() else name
    # A model may bring code of its own, which would run here: not without being asked for, and nothing asks for it.
    config, unknown = transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=False, return_unused_kwargs=True, **arguments
    )
    if unknown:
        key = next(iter(unknown))
        near = difflib.get_close_matches(key, config.to_dict(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"hf:{name}: {type(config).__name__} has no {key}{hint}")
    make = _class_for(transformers, config)
    if pretrained:
        return make.from_pretrained(source, config=config, use_safetensors=True, dtype=torch.float32)
    return make(config)


def _class_for(transformers: Any, config: Any) -> Any:
    """The class that the configuration names; else one that classifies images, if there is one; else the bare model."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):  # it may name a tool as well
            return named
    for task in ("IMAGE_CLASSIFICATION_", ""):
        mapping = getattr(transformers, f"MODEL_FOR_{task}MAPPING" if task else "MODEL_MAPPING")
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found  # DeiT's has a second one, with a teacher
    raise UserError(f"transformers has no model for a {type(config).__name__}")


def _import(library: str, extra: str) -> Any:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise UserError(f"{library} is not installed; pip install 'vitrefine[{extra}]'") from error


def _did_you_mean(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {', '.join(near)}?" if near else f"there are {len(names)}, none of a name like it"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _sentence(base: Call, error: Exception) -> str:
    """What went wrong while a library made a model."""
    kinds = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    if kinds & UNREACHABLE:
        return f"{base.name} cannot be fetched, because its server cannot be reached; a local copy needs none"
    if kinds & NOT_THERE:
        return f"{base.name} is not there, or not open to you: look its name up on https://huggingface.co/models"
    if unexpected := UNEXPECTED.search(str(error)):
        return f"{base.name} takes no argument {unexpected[1]}"
    if fixed := FIXED.search(str(error)):
        return f"{base.name} sets {fixed[1]} itself, so it takes no argument {fixed[1]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    what = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    what = f"there is no {what}" if isinstance(error, KeyError) else what
    return f"{base} cannot be made: {what.rstrip('.')}"
