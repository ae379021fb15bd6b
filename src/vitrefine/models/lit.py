"""LIT, "Less attention vIsion Transformer" (Pan et al.), Table 1; LIT-Ti* and LIT-S* of Table 3 merge uniformly."""

from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from vitrefine.models.config import imagenet_cfg
from vitrefine.models.pyramid import create_pyramid

# LIT-Ti is made to be compared with PVT-S, the others with Swin-T, S and B.
TINY: dict[str, Any] = {}
SMALL = {
    "embed_dims": (96, 192, 384, 768),
    "depths": (2, 2, 6, 2),
    "num_heads": (3, 6, 12, 24),
    "mlp_ratios": (4, 4, 4, 4),
    "relative": True,
    "norm_eps": 1e-5,
}
MEDIUM = {**SMALL, "depths": (2, 2, 18, 2)}
BASE = {**MEDIUM, "embed_dims": (128, 256, 512, 1024), "num_heads": (4, 8, 16, 32)}


default_cfgs = generate_default_cfgs(
    {f"lit_{name}.untrained": imagenet_cfg() for name in ("ti", "s", "m", "b", "ti_star", "s_star")}
)


@register_model
def lit_ti(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """LIT-Ti: MLP stages 1-2, attention in stages 3-4, deformable merging."""
    return create_pyramid("lit_ti", pretrained, TINY, kwargs)


@register_model
def lit_s(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """LIT-S: as LIT-Ti on Swin-T's widths, relative position bias, mean pooling."""
    return create_pyramid("lit_s", pretrained, SMALL, kwargs)


@register_model
def lit_m(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """LIT-M: LIT-S with 18 blocks in stage 3."""
    return create_pyramid("lit_m", pretrained, MEDIUM, kwargs)


@register_model
def lit_b(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """LIT-B: LIT-M on Swin-B's widths."""
    return create_pyramid("lit_b", pretrained, BASE, kwargs)


@register_model
def lit_ti_star(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """LIT-Ti*: LIT-Ti with PVT's uniform merging."""
    return create_pyramid("lit_ti_star", pretrained, {**TINY, "merging": "conv"}, kwargs)


@register_model
def lit_s_star(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """LIT-S*: LIT-S with Swin's uniform merging."""
    return create_pyramid("lit_s_star", pretrained, {**SMALL, "merging": "swin"}, kwargs)
