"""The file of a checkpoint: weights as safetensors, and what is known of them as JSON in the metadata.

The metadata is `{"format": "pt", "vitrefine": JSON}`, so that timm and Hugging Face tools read the weights too:

    spec      every option spelled out, for defaults may change from one version to the next
    version   of vitrefine, that wrote it
    input     input_size, mean, std, crop_pct, crop_mode, interpolation: as far as they are known
    classes   their names, where given
    config    of a transformers model, so that rebuilding it needs no network
    tied      names that share another name's tensor, which is stored once
    crc32     of the weights

Nothing here unpickles.
"""

import json
import zlib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from vitrefine import __version__
from vitrefine.errors import UserError
from vitrefine.files import replace_file

State = dict[str, Tensor]
Info = dict[str, Any]

KEY = "vitrefine"


def write(path: str | Path, state: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write weights and what is known of them.

    Args:
        path: The file; one that is there is replaced when the new one is complete.
        state: Weights by name; they may share memory.
        info: What the head of this file lists, and "spec" at least; the rest is added.
    """
    weights, tied = _once_each(state)
    info = {"version": __version__, **info, "crc32": _crc32(weights)} | ({"tied": tied} if tied else {})
    try:
        said = json.dumps(info)
    except TypeError as error:  # an array among the means, or the like
        raise UserError(
            f"a checkpoint tells of images and classes in numbers, texts and lists of these: {error}"
        ) from error
    content = serialise(weights, {"format": "pt", KEY: said})
    replace_file(Path(path), content)


def read(path: str | Path) -> tuple[State, Info]:
    """The weights in a file and what is known of them, or a `UserError` that says what is wrong with the file."""
    weights, info = read_any(path)
    if info is None:
        raise UserError(
            f"{path} holds weights but no spec; build its model with vitrefine.create(…) and give the weights to "
            "its load_state_dict, then vitrefine.save it"
        )
    return weights, info


def read_any(path: str | Path) -> tuple[State, Info | None]:
    """As `read`, for files of any origin; nothing is known of weights that others wrote."""
    with _opened(path) as file:
        # Copied: tensors that lie in the file change with it, and end the process where it gets shorter.
        weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
        info = _info(path, file)
    if info is None:
        return weights, None
    if "crc32" in info and info["crc32"] != _crc32(weights):
        raise UserError(f"{path} is damaged: its weights are not those that were written; copy it again")
    return weights | {name: weights[kept] for name, kept in info.get("tied", {}).items()}, info


def read_info(path: str | Path) -> Info | None:
    """What is known of the weights in a file, which are not read; None where others wrote it."""
    with _opened(path) as file:
        return _info(path, file)


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}; name weights that are there") from error
    except (OSError, SafetensorError) as error:
        raise UserError(_what_is_wrong(Path(path), error)) from error


def _info(path: str | Path, file: Any) -> Info | None:
    metadata = file.metadata() or {}
    if KEY not in metadata:
        return None
    try:
        info: Info = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: its metadata are no JSON") from error
    if not _well_formed(info, set(file.keys())):
        raise UserError(f"{path} is damaged: its metadata do not say what its weights belong to")
    return info


def _well_formed(info: Any, weights: Container[str]) -> bool:
    if not isinstance(info, dict) or not isinstance(info.get("spec"), str):
        return False
    kinds = {"tied": dict, "input": dict, "config": dict, "classes": list}
    if not all(isinstance(info.get(name, kind()), kind) for name, kind in kinds.items()):
        return False
    tied = info.get("tied", {}).items()
    return all(isinstance(kept, str) and kept in weights and name not in weights for name, kept in tied)


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
