"""A trained model that a student learns from: its predictions for an image, or for every place of it.

The teacher is given the image that the student sees, mixed and augmented, but prepared as the teacher knows images:
with its own mean and deviation, and at its own size where it takes no other.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import get_pretrained_cfg_value, is_model
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.checkpoint import load
from vitrefine.surgery.create import create
from vitrefine.surgery.spec import parse
from vitrefine.train.output import logits_of


class Teacher(nn.Module):
    """A frozen model in evaluation mode.

    Args:
        model: It becomes the teacher's own: its parameters are frozen.
        mean, std: What the student's images were normalised with; None if as the teacher's.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, model: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.model: Any = model.requires_grad_(False)
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        its_mean, its_std = config.get("mean") or mean or (0.0,), config.get("std") or std or (1.0,)
        # images · std + mean are the bare pixels
        scale = torch.tensor(std or its_std) / torch.tensor(its_std)
        shift = (torch.tensor(mean or its_mean) - torch.tensor(its_mean)) / torch.tensor(its_std)
        self.register_buffer("scale", scale[:, None, None])
        self.register_buffer("shift", shift[:, None, None])
        self.eval()

    def train(self, mode: bool = True) -> "Teacher":
        """Stay in evaluation mode, whatever the student does."""
        return super().train(False)

    def prepare(self, images: Tensor) -> Tensor:
        """The student's images as the teacher takes them."""
        patches: Any = getattr(self.model, "patch_embed", None)
        size = patches.img_size if getattr(patches, "strict_img_size", False) else None
        if size and size != images.shape[-2:]:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return images * self.scale + self.shift

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return logits_of(self.model(self.prepare(images)))

    @torch.no_grad()
    def dense(self, images: Tensor) -> Tensor:
        """Logits (B, classes, h, w) at each place of the last feature map, each place taken for an image of its own.

        A model of tokens is refused, for its patches never learnt to be classified.
        """
        images = self.prepare(images)
        features = self.model.forward_features(images) if hasattr(self.model, "forward_head") else None
        if features is None or features.ndim != 4:
            raise UserError(
                f"the teacher {type(self.model).__name__} has no feature map that could be classified place by place; "
                "set loss.token_labels.teacher to a convolutional or hierarchical model of timm"
            )
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":
            batch, height, width, channels = features.shape
            places = features.reshape(-1, 1, 1, channels)
        else:
            batch, channels, height, width = features.shape
            places = features.permute(0, 2, 3, 1).reshape(-1, channels, 1, 1)
        return self.model.forward_head(places).unflatten(0, (batch, height, width)).permute(0, 3, 1, 2)


def open_teacher(
    text: str,
    classes: int,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: torch.device | str | None = None,
) -> Teacher:
    """The teacher that a recipe names.

    Args:
        text: A spec with pretrained weights, as `regnety_160.deit_in1k(pretrained=true)`, or what `load` takes: a
            .safetensors file, a folder or `hf-hub:owner/name`.
        classes: How many the student tells apart.
        mean, std: What the student's images are normalised with.
        device: Where it goes.
    """
    model: Any = load(text) if _is_checkpoint(text) else _pretrained(text, classes)
    its_classes: Any = getattr(model, "num_classes", None) or getattr(
        getattr(model, "config", None), "num_labels", classes
    )
    _check_classes(text, its_classes, classes)
    channels = getattr(model, "in_chans", None)
    if mean and channels and channels != len(mean):
        raise UserError(f"the teacher {text} takes images of {channels} channels, but the data has {len(mean)}")
    return Teacher(model, mean, std).to(device)


def _is_checkpoint(text: str) -> bool:
    return text.endswith(".safetensors") or text.startswith("hf-hub:") or os.path.exists(text)


def _pretrained(text: str, classes: int) -> nn.Module:
    spec = parse(text)
    if not any(spec.base.args.get(name) for name in ("pretrained", "weights", "checkpoint_path")):
        raise UserError(f"the teacher {text} would have random weights; add (pretrained=true), or name a checkpoint")
    if spec.library == "timm" and is_model(spec.model) and "num_classes" not in spec.base.args:
        # before gigabytes are fetched
        known = get_pretrained_cfg_value(spec.model, "num_classes")
        _check_classes(text, int(known or classes), classes)
    return create(spec)


def _check_classes(text: str, its_classes: int, classes: int) -> None:
    if its_classes != classes:
        raise UserError(
            f"the teacher {text} tells {its_classes} classes apart, but the data has {classes}; "
            "set the recipe's teacher to a model trained on this data"
        )
