"""Weights of the authors' repositories under our names: nothing but renaming, so outputs stay what they were."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrefine.errors import UserError

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


def read_checkpoint(path: Path) -> State:
    """The weights in a file of the authors' repositories, read without running any code that it may carry."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no one exception for this: pickle, zip, EOF and runtime errors all occur
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is no checkpoint that can be read safely, or it is cut short ({reason})") from error
    return unwrap(content, path)


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
    if source not in _RENAME:
        raise UserError(f"there is no converter from {source!r}; choose one of {', '.join(SOURCES)}")
    renamed: State = {}
    for name, tensor in state.items():
        if name.endswith("relative_position_index"):  # a constant of the grid; ours is computed
            continue
        new = name
        for pattern, replacement in _RENAME[source]:
            new = re.sub(pattern, replacement, new)
        # A block that shares maps has values alone, in a square layer that the authors call qkv too.
        if source == "refiner" and re.search(r"\bqkv\.weight$", name) and tensor.shape[0] == tensor.shape[1]:
            new = re.sub(r"\bqkv\.", "v.", new)
        renamed[new] = tensor
    for name in [n for n in renamed if n.endswith("qkv.bias") and n.removesuffix("qkv.bias") + "v.weight" in renamed]:
        renamed[name.removesuffix("qkv.bias") + "v.bias"] = renamed.pop(name)
    return renamed


def _fill_scales(state: State) -> None:
    """Checkpoints from before the MLP branch was scaled: a scale of ones is what they were trained with."""
    for name in [n for n in state if re.fullmatch(r"blocks\.\d+\.mlp\.fc2\.bias", n)]:
        state.setdefault(name.replace("mlp.fc2.bias", "ls2.gamma"), torch.ones_like(state[name]))


def identify(state: Mapping[str, Tensor], source: str) -> tuple[str, dict[str, Any]]:
    """Which model the renamed weights belong to: its name, and the arguments that differ from its defaults."""
    try:
        arguments: dict[str, Any] = {}
        classes = state["head.weight"].shape[0]
        if source == "refiner":
            size = (state["pos_embed"].shape[-1], _count(state, r"blocks\.(\d+)\."))
            name = {(384, 16): "refined_vit_s", (420, 32): "refined_vit_m", (512, 32): "refined_vit_l"}.get(size)
            side = round((state["pos_embed"].shape[1] - 1) ** 0.5) * 16
            if "aux_head.weight" in state:
                arguments["token_labels"] = True
        else:
            size = (state["patch_embed.proj.weight"].shape[0], _count(state, r"stages\.2\.blocks\.(\d+)\."))
            named = {(64, 6): "lit_ti", (96, 6): "lit_s", (96, 18): "lit_m", (128, 18): "lit_b"}
            name = named.get(size)
            side = 224
            if "stages.0.pos_embed" in state:
                side = round(state["stages.0.pos_embed"].shape[1] ** 0.5) * 4
            elif name:
                rows = state["stages.2.blocks.0.attn.position.table"].shape[0]
                side = (round(rows**0.5) + 1) // 2 * 16
    except KeyError as error:
        raise UserError(f"the checkpoint lacks {error.args[0]!r}, so it is no {source} model") from error
    if name is None:
        width, depth = size
        raise UserError(f"no {source} model is {width} wide and {depth} blocks deep; the published ones convert")
    if side != 224:
        arguments["img_size"] = side
    if classes != 1000:
        arguments["num_classes"] = classes
    return name, arguments


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """How many different indices the first group of `pattern` takes among the names."""
    return len({match[1] for name in state if (match := re.match(pattern, name))})


def convert(path: Path, source: str) -> tuple[str, dict[str, Any], State]:
    """Read an official checkpoint: model name, its arguments, and weights that load `strict=True`."""
    import timm

    import vitrefine.models  # noqa: F401  (registers the names)

    state = rename(read_checkpoint(path), source)
    name, arguments = identify(state, source)
    if source == "refiner":
        _fill_scales(state)
    with torch.device("meta"):
        expected = timm.create_model(name, **arguments).state_dict()
    extra, missing = sorted(state.keys() - expected.keys()), sorted(expected.keys() - state.keys())
    wrong = sorted(n for n in state.keys() & expected.keys() if state[n].shape != expected[n].shape)
    for what, names in (("has weights left over", extra), ("lacks weights", missing), ("has misshapen weights", wrong)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UserError(f"{path} {what} as {name}: {shown}")
    return name, arguments, state
