"""What a recipe says about its data: how images are read, and how they are changed while training."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vitrefine.errors import UserError

Share = Annotated[float, Field(ge=0, le=1)]
LEAST_RATIO, MOST_RATIO = 0.1, 4.0  # with less of them left, images would be resized to more than memory holds


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Augment(_Options):
    """Changes of the training images, and of their targets."""

    crop: Literal["resized", "pad", "none"] = "resized"
    """`resized`: a box of random area and shape; `pad`: a shift by up to `padding` pixels; `none`: the whole image."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and greatest area of that box, as shares of the image's."""
    padding: Annotated[int, Field(ge=0)] = 4
    flip: Share = 0.5
    """Probability of a mirrored image."""
    rand_augment: Annotated[float, Field(ge=0, le=10)] | None = 9.0
    """Strength of RandAugment; None for none."""
    rand_augment_std: Annotated[float, Field(ge=0)] = 0.5
    mixup: Share = 0.8
    """Parameter of mixup's Beta distribution; 0 for none."""
    cutmix: Share = 1.0
    """The same of CutMix; where both are on, an image gets either with equal probability."""
    mix_probability: Share = 1.0
    erasing: Share = 0.25
    """Probability that a box of an image is filled with noise."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of a label that is spread over all classes."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """How often an image comes in an epoch, each time augmented anew (of an epoch as long as without repeats)."""

    @field_validator("scale")
    @classmethod
    def _within_the_image(cls, scale: tuple[float, float]) -> tuple[float, float]:
        least, greatest = scale
        if not 0 < least <= greatest <= 1:
            raise ValueError(f"scale is {least}, {greatest}, but 0 < least ≤ greatest ≤ 1 is needed")
        return scale


NOTHING = Augment(crop="none", flip=0, rand_augment=None, mixup=0, cutmix=0, mix_probability=0, erasing=0, smoothing=0)
"""Training images as they are."""


class DataOptions(_Options):
    """How images are read."""

    size: Annotated[int, Field(ge=1)] | None = None
    """Side of the images that the model sees; the set's or the model's own if None."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training images that is held out and takes the place of the test images."""
    workers: Annotated[int, Field(ge=0)] = 4
    """Processes that read and augment images; sets in memory need none."""
    test_batch: Annotated[int, Field(ge=1)] = 256
    crop_ratio: Annotated[float, Field(ge=LEAST_RATIO, le=MOST_RATIO)] | None = None
    """Side of the test image over that of the resized one; None for 1 in memory and 0.875 elsewhere; above 1 pads."""
    max_broken: Share = 0.01
    """Share of images that may be unreadable before a run stops."""


def check_size(size: tuple[int, int]) -> tuple[int, int]:
    """Refuse an image without pixels."""
    if min(size) < 1:
        raise UserError(f"images of {size[0]}×{size[1]} pixels cannot be made; give a size of at least 1")
    return size
