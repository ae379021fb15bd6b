"""PVT-S (Wang et al.), LIT's counterpart, and "PVT-S w/ MSA" of LIT Table 5.

Attention is taken out of stages by `attention`, one number each: `pvt_small_msa(attention=[0,0,1,1])` removes it
from stages 1 and 2.
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from vitrefine.models.config import imagenet_cfg
from vitrefine.models.pyramid import create_pyramid

default_cfgs = generate_default_cfgs({f"{name}.untrained": imagenet_cfg() for name in ("pvt_small", "pvt_small_msa")})


@register_model
def pvt_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-S: spatially reduced attention in every stage, uniform merging."""
    return create_pyramid("pvt_small", pretrained, {"attention": (8, 4, 2, 1), "merging": "conv"}, kwargs)


@register_model
def pvt_small_msa(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-S w/ MSA: full attention in every stage that `attention` does not set to 0."""
    return create_pyramid("pvt_small_msa", pretrained, {"attention": (1, 1, 1, 1), "merging": "conv"}, kwargs)
