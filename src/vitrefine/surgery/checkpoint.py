"""Checkpoints that know what they are: weights as safetensors, and in the file's metadata the spec that rebuilds them.

The metadata is `{"format": "pt", "vitrefine": JSON}`, so that timm and Hugging Face tools read the weights too:

    spec      every option spelled out, for defaults may change from one version to the next
    version   of vitrefine, that wrote it
    input     input_size, mean, std, crop_pct, crop_mode, interpolation: as far as they are known
    classes   their names, where given
    config    of a transformers model, so that rebuilding it needs no network
    tied      names that share another name's tensor, which is stored once
    crc32     of the weights

A file is written beside the old one and renamed, so neither a full disk nor a kill leaves half a file or harms the old.
Nothing here unpickles.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine import __version__
from vitrefine.errors import UserError
from vitrefine.surgery.create import SOURCES, config_of, rebuild, report_of, spec_of
from vitrefine.surgery.graft import surgery_of
from vitrefine.surgery.inputs import example_inputs
from vitrefine.surgery.registry import get
from vitrefine.surgery.spec import Call, Spec, parse

T = TypeVar("T")
State = dict[str, Tensor]
Info = dict[str, Any]

KEY = "vitrefine"
WEIGHTS, CARD = "model.safetensors", "README.md"  # in a folder
HUB = ("hf-hub:", "hf_hub:")
INPUT = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")


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
    file = _located(path)
    state, info = read(file)
    try:
        spec = parse(info["spec"])
        _check_harmless(spec.base)
        model = _rebuilt(spec, _harmless(info.get("config")), kwargs, state)
    except UserError as error:
        version = info.get("version")
        by = "" if version == __version__ else f" (vitrefine {version} wrote it, this is {__version__})"
        raise UserError(f"{path} cannot be loaded: {error}{by}") from error
    _tie(model, info.get("tied", {}))
    _equip(model, info)
    return model.eval().to(device)


def save_folder(
    model: nn.Module,
    folder: str | Path,
    *,
    input_config: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write a model to a folder as the Hugging Face Hub has it: weights, config.json and a README.md; `load` reads it.

    Args:
        model: As for `save`.
        folder: It is created if it is not there.
        input_config: As for `save`.
        classes: As for `save`.
    """
    folder, model = Path(folder), unwrap_model(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made a folder: {error.strerror}") from error
    info = describe(model, input_config, classes)
    write(folder / WEIGHTS, model.state_dict(), info)
    config = {"library_name": KEY, "version": __version__, **info}
    _replace(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    _replace(folder / CARD, _card(model, folder.name).encode())


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    input_config: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> str:
    """Put a model on the Hugging Face Hub, and return its address there.

    Args:
        model: As for `save`.
        repo_id: `"owner/name"`; it is created if it is not there. A model card that it has already is kept.
        token: The one that `hf auth login` keeps if None.
        private: Whether a repository that is created is private; as the owner has set it if None.
        input_config: As for `save`.
        classes: As for `save`.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        save_folder(model, folder, input_config=input_config, classes=classes)
        Path(folder, CARD).write_text(_card(unwrap_model(model), f"{HUB[0]}{repo_id}"))
        api = HfApi(token=token)
        address = _online(repo_id, lambda: api.create_repo(repo_id, private=private, exist_ok=True))
        own = _online(repo_id, lambda: api.file_exists(repo_id, CARD))  # a card that is there may be someone's work
        kept = [CARD] if own else None
        _online(repo_id, lambda: api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=kept))
    return str(address)


def _located(path: str | Path) -> Path:
    text = str(path)
    if text.startswith(HUB):
        from huggingface_hub import hf_hub_download

        name, _, revision = text[len(HUB[0]) :].partition("@")
        return Path(_online(name, lambda: hf_hub_download(name, WEIGHTS, revision=revision or None)))
    path = Path(path)
    if path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise UserError(f"{path} is a folder without a {WEIGHTS}; name the file")
        return path / WEIGHTS
    return path


def _online(repo_id: str, ask: Callable[[], T]) -> T:
    # The base of all errors of its HTTP client, whichever one this version of huggingface_hub uses.
    from huggingface_hub.errors import HTTPError

    try:
        return ask()
    except (HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"{repo_id} cannot be reached on the Hugging Face Hub ({reason}); "
            "check its name, the network and that you are logged in (hf auth login)"
        ) from error


def _card(model: nn.Module, address: str) -> str:
    """The model card: what it is, what was changed and how to load it."""
    report = report_of(model)
    changed = f"What `vitrefine` changed in it:\n\n```\n{report}\n```\n" if report.changes else ""
    return (
        f"---\nlibrary_name: {KEY}\ntags:\n- {KEY}\n---\n\n# {spec_of(model)}\n\n"
        f'```python\nimport vitrefine\n\nmodel = vitrefine.load("{address}")\n```\n\n{changed}'
    )


def write(path: str | Path, state: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write weights and what is known of them.

    Args:
        path: The file; one that is there is replaced when the new one is complete.
        state: Weights by name; they may share memory.
        info: What the head of this file lists, and "spec" at least; the rest is added.
    """
    weights, tied = _once_each(state)
    info = {"version": __version__, **info, "crc32": _crc32(weights)} | ({"tied": tied} if tied else {})
    content = serialise(weights, {"format": "pt", KEY: json.dumps(info)})
    _replace(Path(path), content)


def read(path: str | Path) -> tuple[State, Info]:
    """The weights in a file and what is known of them, or a `UserError` that says what is wrong with the file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        raise UserError(_what_is_wrong(Path(path), error)) from error
    if KEY not in metadata:
        raise UserError(
            f"{path} holds weights but no spec; build its model with vitrefine.create(…) and give the weights to "
            "its load_state_dict, then vitrefine.save it"
        )
    try:
        info = json.loads(metadata[KEY])
    except ValueError as error:
        raise UserError(f"{path} is damaged: its metadata are no JSON") from error
    if not _well_formed(info, weights):
        raise UserError(f"{path} is damaged: its metadata do not say what its weights belong to")
    if "crc32" in info and info["crc32"] != _crc32(weights):
        raise UserError(f"{path} is damaged: its weights are not those that were written; copy it again")
    return weights | {name: weights[kept] for name, kept in info.get("tied", {}).items()}, info


def _well_formed(info: Any, weights: State) -> bool:
    if not isinstance(info, dict) or not isinstance(info.get("spec"), str):
        return False
    kinds = {"tied": dict, "input": dict, "config": dict, "classes": list}
    if not all(isinstance(info.get(name, kind()), kind) for name, kind in kinds.items()):
        return False
    return all(kept in weights and name not in weights for name, kept in info.get("tied", {}).items())


def describe(
    model: nn.Module, input_config: Mapping[str, Any] | None = None, classes: Sequence[str] | None = None
) -> Info:
    """What a checkpoint says of a model besides its weights."""
    spec, config = spec_of(model), getattr(model, "pretrained_cfg", None) or {}
    known = {name: config[name] for name in INPUT if config.get(name) is not None}
    images = (known | {"input_size": size} if (size := _input_size(model, spec)) else {}) | dict(input_config or {})
    if unknown := sorted(images.keys() - set(INPUT)):
        raise UserError(f"an input configuration has no {unknown[0]}; it has {', '.join(INPUT)}")
    named = classes or config.get("label_names")
    explicit = Spec(spec.base, tuple(_spelled_out(call) for call in spec.modifications))
    optional = {"classes": named and list(named), "config": config_of(model, spec)}
    return {"spec": str(explicit), "input": images} | {name: value for name, value in optional.items() if value}


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


def _once_each(state: Mapping[str, Tensor]) -> tuple[State, dict[str, str]]:
    """Weights as the format takes them, without shared memory; and for each name left out, the name it equals."""
    kept: State = {}
    tied: dict[str, str] = {}
    places: dict[Any, str] = {}
    storages = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise UserError(f"{name} is no tensor with values to write, so the model cannot be saved")
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        if tensor.numel() and place in places:
            tied[name] = places[place]
            continue
        places[place] = name
        kept[name] = tensor.detach().clone() if storage in storages else tensor.detach()
        kept[name] = kept[name].contiguous()
        storages.add(storage)
    return kept, tied


def _crc32(weights: State) -> int:
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(weights[name].cpu().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _what_is_wrong(path: Path, error: Exception) -> str:
    """Why a file cannot be read, by a look at its beginning: the length of the header, then the header's brace."""
    if isinstance(error, OSError):
        return f"{path} cannot be read: {error.strerror or error}"
    with path.open("rb") as file:
        beginning = file.read(9)
    if not beginning:
        return f"{path} is empty; copy it again"
    if beginning[8:] == b"{":
        return f"{path} is damaged or cut short; copy it again"
    if beginning.startswith((b"PK", b"\x80")):
        return f"{path} is a pickle, which may run any code when it is read; load takes .safetensors only"
    return f"{path} is no safetensors file"


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
    misshapen = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    wrong = [("too many", extra), ("missing", missing), ("of another shape", misshapen)]
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
