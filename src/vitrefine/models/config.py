"""What timm's tools want to know of a model: how its images are prepared, and the names of its two ends."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def imagenet_cfg(**overrides: Any) -> dict[str, Any]:
    """The configuration of a model for ImageNet at 224, prepared as DeiT, PVT and Swin are unless told otherwise."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,  # positions are made for one size, though other images pass: timm sets img_size by it
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **overrides,
    }
