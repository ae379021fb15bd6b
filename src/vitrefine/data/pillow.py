"""The transforms of single images, run in worker processes: timm's, ending in uint8 (C, H, W)."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrefine.data.options import Augment

Transform = Callable[[Image.Image], Tensor]

INTERPOLATION = "bicubic"
TEST_CROP_RATIO = 0.875


def training_transform(augment: Augment, size: tuple[int, int], mean: tuple[float, ...]) -> Transform:
    """Crop, flip and RandAugment; what needs a whole batch, or floats, is left to the device."""
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_interp_mode, str_to_pil_interp
    from torchvision import transforms

    mode = str_to_interp_mode(INTERPOLATION)
    steps: list[Callable]
    if augment.crop == "resized":
        steps = [RandomResizedCropAndInterpolation(size, scale=augment.scale, interpolation=INTERPOLATION)]
    else:
        steps = [transforms.Resize(min(size) if size[0] == size[1] else size, mode), transforms.CenterCrop(size)]
        if augment.crop == "pad":
            steps.append(transforms.RandomCrop(size, padding=augment.padding))
    if augment.flip > 0:
        steps.append(transforms.RandomHorizontalFlip(augment.flip))
    if augment.rand_augment is not None:
        rand_augment = rand_augment_transform(
            f"rand-mstd{augment.rand_augment_std:f}-inc1",
            {
                "translate_const": int(min(size) * 0.45),
                "img_mean": tuple(min(255, round(255 * level)) for level in mean),
                "interpolation": str_to_pil_interp(INTERPOLATION),
            },
        )
        for operation in rand_augment.ops:  # the text above takes whole numbers only
            operation.magnitude = augment.rand_augment
        steps.append(rand_augment)
    return transforms.Compose([*steps, transforms.PILToTensor()])


def testing_transform(size: tuple[int, int], crop_ratio: float | None) -> Transform:
    """Resize, and cut out the middle."""
    from timm.data import create_transform

    ratio = TEST_CROP_RATIO if crop_ratio is None else crop_ratio
    return create_transform(
        (3, *size), is_training=False, use_prefetcher=True, interpolation=INTERPOLATION, crop_pct=ratio
    )


@contextmanager
def chance_from(seed: int) -> Iterator[None]:
    """Let Python's, NumPy's and PyTorch's (CPU) randomness start from `seed` inside, and go on as before after."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
