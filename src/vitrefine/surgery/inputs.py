"""Arguments with which a model can be run, found from what it says of itself."""

from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2  # two, so that an axis which holds the batch times something can be told from one that holds something
TEXT_LENGTH = 16


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """An image of the model's own size; for a language model some tokens. By name, "" for the first argument."""
    config = getattr(model, "config", None)
    if hasattr(config, "vocab_size"):
        tokens = torch.zeros(BATCH, TEXT_LENGTH, dtype=torch.long)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return inputs | (_image(config) if hasattr(config, "image_size") else {})
    if hasattr(config, "image_size"):
        return _image(config)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = cfg.get("input_size", (3, 224, 224))
    embedding = getattr(model, "patch_embed", None)
    for owner, attribute in ((embedding, "img_size"), (model, "img_size"), (model, "image_size")):
        size = getattr(owner, attribute, None) or size
    return {"": torch.empty(BATCH, getattr(model, "in_chans", channels), *_pair(size))}


def _image(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(BATCH, getattr(config, "num_channels", 3), *_pair(config.image_size))}


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
