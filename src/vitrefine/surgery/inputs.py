"""Arguments with which a model can be run, found from what it says of itself."""

from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2  # two, so that an axis which holds the batch times something can be told from one that holds something
TEXT_LENGTH = 16


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """An image of the model's own size; for a language model some tokens. By name, "" for the first argument."""
    config = getattr(model, "config", None)
    image, text = (_part(config, part, field) for part, field in (("vision", "image_size"), ("text", "vocab_size")))
    inputs: dict[str, Tensor] = {}
    if text is not None:
        inputs["input_ids"] = torch.zeros(BATCH, TEXT_LENGTH, dtype=torch.long)
    if image is not None:
        channels = getattr(image, "num_channels", 3)
        inputs["pixel_values"] = torch.empty(BATCH, channels, *_pair(image.image_size))
    if inputs:
        return inputs
    cfg = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = cfg.get("input_size", (3, 224, 224))
    embedding = getattr(model, "patch_embed", None)
    for owner, attribute in ((embedding, "img_size"), (model, "img_size"), (model, "image_size")):
        size = getattr(owner, attribute, None) or size
    return {"": torch.empty(BATCH, getattr(model, "in_chans", channels), *_pair(size))}


def normalisation(model: nn.Module, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and deviation with which a model takes images of so many channels, where it says which."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    mean, std = config.get("mean"), config.get("std")
    return (tuple(mean), tuple(std)) if mean and std and len(mean) == len(std) == channels else None


def _part(config: Any, part: str, field: str) -> Any:
    """The configuration that has this field: a Hugging Face model's own, or that of its part for images or text."""
    for owner in (config, getattr(config, f"{part}_config", None)):
        if hasattr(owner, field):
            return owner
    return None


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
