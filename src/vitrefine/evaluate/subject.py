"""The model that is tested, with images prepared as it knows them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.data.dataset import DataSet
from vitrefine.data.options import LEAST_RATIO, MOST_RATIO
from vitrefine.data.pillow import TEST_CROP_RATIO
from vitrefine.errors import UserError, check_choice
from vitrefine.surgery.base import NAMES
from vitrefine.surgery.create import spec_of
from vitrefine.surgery.inputs import example_inputs, normalisation
from vitrefine.train.output import logits_of

Size = tuple[int, int]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode that takes bare pixels."""

    model: nn.Module
    name: str
    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_ratio: float
    """Of the crop at test time, unless another one is tried."""
    device: torch.device
    precision: str
    key: str
    """Hash of what it is and of its weights."""
    notes: tuple[str, ...]
    """What a reader of its figures should know."""

    def logits(self, pixels: Tensor) -> Tensor:
        """Class logits (B, classes) of pixels (B, C, H, W) from 0 to 1, in float32; gradients reach the pixels."""
        mean, std = self._normalisation
        reduced = PRECISIONS[self.precision]
        with torch.autocast(self.device.type, reduced, enabled=reduced is not None):
            found = logits_of(self.model(((pixels - mean) / std).to(_dtype_of(self.model))))
        return found.float()

    @cached_property
    def _normalisation(self) -> tuple[Tensor, Tensor]:
        """On the device once, for every copy to it makes the host wait."""
        with torch.inference_mode(False):  # attacks could not use what `measure_speed` would leave here
            mean, std = (torch.tensor(x, device=self.device).view(1, -1, 1, 1) for x in (self.mean, self.std))
        return mean, std


def subject_of(
    model: nn.Module,
    data: DataSet,
    *,
    name: str | None = None,
    size: Size | None = None,
    crop_ratio: float | None = None,
    device: str | torch.device | None = None,
    precision: str = "fp32",
) -> Subject:
    """Make a model the subject of an evaluation; it is put into evaluation mode and onto the device.

    Args:
        model: Any that takes images and gives logits.
        data: What it will be tested on; its mean and deviation are taken where the model says none.
        name: What to call it; its spec if None.
        size: Of the images; what the model was made for if None, or else that of the data.
        crop_ratio: At test time; the model's own if None. But images that are all of one size are left uncut, unless
            the model knows its classes: then it was trained on such ones, with the ratio that it says.
        device: The GPU, if there is one, where None is given.
        precision: `fp32`, or `bf16` for autocast.
    """
    check_choice("precision", precision, PRECISIONS)
    place = _device(device)
    name = name or description(model)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    channels, own_size = _input(model, name, data)
    if channels != data.channels:
        raise UserError(
            f"{name} takes images of {channels} channels, but {data.name} has {data.channels}; choose others"
        )
    classes = getattr(model, "num_classes", None) or len(data.classes)
    if classes != len(data.classes):
        raise UserError(
            f"{name} tells {classes} classes apart, but {data.name} has {len(data.classes)}; "
            "test it on the classes that it was trained on"
        )
    used, notes = normalisation(model, channels), []
    if used is None:
        notes.append(f"the model does not say how its images are normalised, so {data.name}'s mean and deviation count")
    mean, std = used or (data.mean, data.std)
    if (dtype := _dtype_of(model)) != torch.float32:
        notes.append(f"the model computes in {str(dtype).removeprefix('torch.')}, as its weights are")
    uncut = data.size and not config.get("label_names")
    usual = 1.0 if uncut else config.get("crop_pct") or TEST_CROP_RATIO
    subject = Subject(
        model=model.eval().to(place),
        name=name,
        size=size or own_size,
        mean=mean,
        std=std,
        crop_ratio=check_ratio(usual if crop_ratio is None else crop_ratio),
        device=place,
        precision=precision,
        key=fingerprint(model),
        notes=tuple(notes),
    )
    if subject.size != own_size:
        _try_size(subject, own_size)
    return subject


def _try_size(subject: Subject, own: Size) -> None:
    asked = f"{subject.size[0]}×{subject.size[1]}"
    try:
        with torch.no_grad():
            subject.logits(torch.zeros(1, len(subject.mean), *subject.size, device=subject.device))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{subject.name} cannot take images of {asked} pixels; it takes {own[0]}×{own[1]} if the size is left out"
        ) from error


def description(model: nn.Module) -> str:
    """The spec of a model, or all that it shows of itself where it has none."""
    try:
        return str(spec_of(model))
    except UserError:
        return type(model).__name__


def check_ratio(ratio: float) -> float:
    """Refuse a crop ratio that cannot be had."""
    if not LEAST_RATIO <= ratio <= MOST_RATIO:
        raise UserError(f"a crop ratio of {ratio:g} cannot be had; give one from {LEAST_RATIO:g} to {MOST_RATIO:g}")
    return ratio


def _device(asked: str | torch.device | None) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"there is no device {asked} here; leave it out, or take cpu") from error
    return device


def _input(model: Any, name: str, data: DataSet) -> tuple[int, Size]:
    """Channels and size of a model's images, from what it says of itself, or else from the data."""
    shapes = [tuple(x.shape[1:]) for x in example_inputs(model).values() if x.ndim == 4]
    if not shapes:
        raise UserError(f"{name} takes no images, so it cannot be tested on {data.name}")
    channels, *size = shapes[0]
    known = any(getattr(model, part, None) for part in ("pretrained_cfg", "config", "image_size", "img_size"))
    if not known and not hasattr(model, "patch_embed"):
        if data.size is None:
            return data.channels, (size[0], size[1])
        return data.channels, data.size
    try:  # not every model shows the size that it was asked to take
        base = spec_of(model).base
    except UserError:
        return channels, (size[0], size[1])
    given: Any = next((base.args[names[2]] for names in NAMES.values() if names[2] in base.args), size)
    return channels, (given, given) if isinstance(given, int) else (int(given[0]), int(given[1]))


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype in which a model takes images: that of its first weights."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)


def fingerprint(model: nn.Module) -> str:
    """Hash of what a model is and of its weights."""
    digest = hashlib.sha256(f"{description(model)}\n{model}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]
