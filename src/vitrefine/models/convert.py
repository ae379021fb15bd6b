"""Weights of the authors' repositories under our names: nothing but renaming, so outputs stay what they were."""

import argparse
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrefine.errors import UserError, check_choice

State = dict[str, Tensor]

# Applied in order, each to the name the one before left.
_RENAME: dict[str, list[tuple[str, str | Callable[[re.Match[str]], str]]]] = {
    "refiner": [
        (r"\bpatch_embed\.conv([123])\.", lambda m: f"patch_embed.convs.{3 * int(m[1]) - 3}."),
        (r"\bpatch_embed\.bn([123])\.", lambda m: f"patch_embed.convs.{3 * int(m[1]) - 2}."),
        (r"\bDLA\.", "refiner.0."),
        (r"\badapt_bn\.", "refiner.1."),
        (r"\bconv_exp\.", "expand.0."),
        (r"\bbn1\.", "expand.1."),
        (r"\bdepth_sep_conv\.|\bconv\.", "local."),
        (r"\bbn2\.", "local_norm."),
        (r"\bconv_pro\.", "reduce."),
        (r"\bbn3\.", "reduce_norm."),
        (r"\bmlp\.scale_channel$", "ls2.gamma"),
    ],
    "lit": [
        (r"^patch_embed1\.", "patch_embed."),
        (r"^patch_embed([234])\.", lambda m: f"stages.{int(m[1]) - 1}.merge."),
        (r"^pos_embed([1234])$", lambda m: f"stages.{int(m[1]) - 1}.pos_embed"),
        (r"^cls_token$", "stages.3.cls_token"),
        (r"^block([1234])\.", lambda m: f"stages.{int(m[1]) - 1}.blocks."),
        (r"^layers\.(\d)\.blocks\.", r"stages.\1.blocks."),
        (r"^layers\.(\d)\.downsample\.", lambda m: f"stages.{int(m[1]) + 1}.merge."),
        (r"\bdconv\.conv_offset\.", "offset."),
        (r"\bdconv\.", "merge."),
        (r"\bnorm_layer\.", "norm."),
        (r"\brelative_position_bias_table$", "position.table"),
    ],
}
SOURCES = tuple(_RENAME)


class Converted(NamedTuple):
    """What a checkpoint turned out to be."""

    name: str
    arguments: dict[str, Any]  # those that differ from the model's defaults
    state: State  # loads `strict=True`
    params: int


class _Settings:
    """Stands for the class of settings that Swin's training script, LIT's model, saves beside the weights."""

    def __new__(cls, *args: Any) -> Any:
        return OrderedDict()


# What training scripts save beside the weights, and is data all the same.
_HARMLESS: list[Any] = [argparse.Namespace, (_Settings, "yacs.config.CfgNode")]


def read_checkpoint(path: Path) -> State:
    """The weights in a file of the authors' repositories, read without running any code that it may carry."""
    if not path.is_file():
        raise UserError(
            f"{path} is a folder, not a file" if path.is_dir() else f"there is no file {path}; name one that is there"
        )
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats and of archives that are refused anyhow
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        carried = re.search(r"\bGLOBAL (\S+)", str(error))
        if carried is None:
            raise _unreadable(path) from error
        raise UserError(
            f"{path} carries {carried[1]}, which may run code, so it was not loaded; save its state dict alone"
        ) from error
    except PermissionError as error:
        raise UserError(f"{path} may not be read; change its permissions or copy it") from error
    except Exception as error:  # torch has no one exception for this: zip, EOF, key and runtime errors all occur
        raise _unreadable(path) from error
    return unwrap(content, path)


def _unreadable(path: Path) -> UserError:
    return UserError(f"{path} is no PyTorch checkpoint, or only a part of one; download it again")


def unwrap(content: Any, path: Path) -> State:
    """Find the weights among what a training script saved beside them; averaged weights are preferred."""
    for key in ("state_dict_ema", "state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(
            f"{path} holds no weights: expected a state dict, or one under state_dict, state_dict_ema or model"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def rename(state: Mapping[str, Tensor], source: str) -> State:
    """The same weights under our names."""
    check_choice("converter from", source, SOURCES)
    renamed: State = {}
    for name, tensor in state.items():
        if name.endswith("relative_position_index"):  # a constant of the grid; ours is computed
            continue
        new = name
        for pattern, replacement in _RENAME[source]:
            new = re.sub(pattern, replacement, new)
        # A block that shares maps has values alone, in a square layer that the authors call qkv too.
        square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
        if source == "refiner" and square and re.search(r"\bqkv\.weight$", name):
            new = re.sub(r"\bqkv\.", "v.", new)
        renamed[new] = tensor
    for name in [n for n in renamed if n.endswith("qkv.bias") and n.removesuffix("qkv.bias") + "v.weight" in renamed]:
        renamed[name.removesuffix("qkv.bias") + "v.bias"] = renamed.pop(name)
    return renamed


def _fill_scales(state: State) -> None:
    """Checkpoints from before the MLP branch was scaled: a scale of ones is what they were trained with."""
    if any(name.endswith("ls2.gamma") for name in state):
        return
    for name in [n for n in state if re.fullmatch(r"blocks\.\d+\.mlp\.fc2\.bias", n)]:
        state[name.replace("mlp.fc2.bias", "ls2.gamma")] = torch.ones_like(state[name])


def identify(state: Mapping[str, Tensor], source: str) -> tuple[str, dict[str, Any]]:
    """Which model the renamed weights belong to: its name, and the arguments that differ from its defaults."""
    try:
        name, arguments = (_identify_refiner if source == "refiner" else _identify_lit)(state)
        classes = state["head.weight"].shape[0]
    except KeyError as error:
        raise UserError(f"the checkpoint lacks {error.args[0]!r}, so it is no {source} model") from error
    except IndexError as error:
        raise UserError(f"the checkpoint has weights of fewer dimensions than a {source} model") from error
    return name, arguments if classes == 1000 else {**arguments, "num_classes": classes}


def _identify_refiner(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    _, tokens, width = _dimensions(state["pos_embed"], 3)
    names = {(384, 16): "refined_vit_s", (420, 32): "refined_vit_m", (512, 32): "refined_vit_l"}
    name = _look_up(names, width, _count(state, r"blocks\.(\d+)\."), "refiner")
    arguments: dict[str, Any] = {"token_labels": True} if "aux_head.weight" in state else {}
    return name, {**arguments, **_size(round((tokens - 1) ** 0.5) * 16)}


def _identify_lit(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    width = state["patch_embed.proj.weight"].shape[0]
    names = {(64, 6): "lit_ti", (96, 6): "lit_s", (96, 18): "lit_m", (128, 18): "lit_b"}
    name = _look_up(names, width, _count(state, r"stages\.2\.blocks\.(\d+)\."), "lit")
    if name == "lit_ti":
        return name, _size(round(_dimensions(state["stages.0.pos_embed"], 3)[1] ** 0.5) * 4)
    rows = state["stages.2.blocks.0.attn.position.table"].shape[0]
    return name, _size((round(rows**0.5) + 1) // 2 * 16)


def _dimensions(tensor: Tensor, count: int) -> torch.Size:
    if tensor.ndim != count:
        raise IndexError
    return tensor.shape


def _look_up(names: Mapping[tuple[int, int], str], width: int, depth: int, source: str) -> str:
    if (width, depth) not in names:
        known = ", ".join(names.values())
        raise UserError(f"no {source} model is {width} wide and {depth} blocks deep; those that convert are {known}")
    return names[width, depth]


def _size(side: int) -> dict[str, Any]:
    return {} if side == 224 else {"img_size": side}


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """How many different indices the first group of `pattern` takes among the names."""
    return len({match[1] for name in state if (match := re.match(pattern, name))})


def _recognise(weights: Mapping[str, Tensor], source: str, path: Path) -> tuple[str, dict[str, Any], State]:
    state = rename(weights, source)
    try:
        return *identify(state, source), state
    except UserError as error:
        for other in SOURCES:
            try:
                identify(rename(weights, other), other)
            except UserError:
                continue
            raise UserError(f"{path} is a checkpoint of {other}, not of {source}; say --from {other}") from error
        raise UserError(f"{path} cannot be converted: {error}") from error


def convert(path: Path, source: str) -> Converted:
    """Read an official checkpoint as a model of ours; a `UserError` says why if it is none."""
    import timm

    import vitrefine.models  # noqa: F401  (registers the names)

    name, arguments, state = _recognise(read_checkpoint(path), source, path)
    if source == "refiner":
        _fill_scales(state)
    try:
        with torch.device("meta"):
            model = timm.create_model(name, **arguments)
    except UserError as error:  # positions for images of a size that no model takes
        raise UserError(f"{path} cannot be converted: {error}") from error
    expected = model.state_dict()
    extra, missing = sorted(state.keys() - expected.keys()), sorted(expected.keys() - state.keys())
    wrong = sorted(n for n in state.keys() & expected.keys() if not _fits(state[n], expected[n]))
    for what, names in (("has weights left over", extra), ("lacks weights", missing), ("has misshapen weights", wrong)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UserError(f"{path} {what} as {name}: {shown}")
    return Converted(name, arguments, state, sum(parameter.numel() for parameter in model.parameters()))


def _fits(tensor: Tensor, expected: Tensor) -> bool:
    same_kind = tensor.is_floating_point() == expected.is_floating_point()
    return same_kind and tensor.shape == expected.shape and tensor.layout == torch.strided
