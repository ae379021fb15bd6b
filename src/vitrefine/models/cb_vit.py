"""ViTs with Context Broadcasting at the end of their MLPs (CB, Tables 2 and 5).

`cb_vit_*` has CB in the upper layers, which the paper does not count: we take the upper half of the blocks; its CB†
is `layers="all"`. `cb_s_vit_*` has CB_S in every block, 12·C parameters: 0.02 % of ViT-S. Everything else, weights'
names included, is timm's DeiT: its state dict loads into `cb_vit_*` as it is, into `cb_s_vit_*` but for the scales.
"""

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import nn

from vitrefine.errors import check_choice
from vitrefine.layers.context_broadcast import ContextBroadcastMlp
from vitrefine.models.config import imagenet_cfg

LAYERS = ("upper", "all")


class ContextBroadcastVisionTransformer(VisionTransformer):
    """timm's ViT with a broadcast at the end of the MLP of some blocks.

    Args:
        broadcast: `cb`, `cb_s`, `cb_gate` or `cb_hybrid`.
        layers: `upper` for the upper half of the blocks, `all` for every one.
        depth: Number of blocks.
        class_token: Whether the first token is a class token.
        **vit_args: The other arguments of `timm.models.VisionTransformer`. The image size is dynamic unless they
            say otherwise: an image is padded to whole patches, and position embeddings are resampled to fit it.
    """

    def __init__(
        self,
        *,
        broadcast: str = "cb",
        layers: str = "upper",
        depth: int = 12,
        class_token: bool = True,
        **vit_args: Any,
    ) -> None:
        check_choice("choice of layers", layers, LAYERS)
        first = depth // 2 if layers == "upper" else 0
        mlp_layer = partial(ContextBroadcastMlp, broadcast=broadcast, class_token=class_token)
        block_fn: Any = partial(_block, first, mlp_layer)  # timm asks for a class and only ever calls it
        vit_args = {"dynamic_img_size": True, "dynamic_img_pad": True, **vit_args}
        super().__init__(depth=depth, class_token=class_token, block_fn=block_fn, **vit_args)


def _block(first: int, upper_mlp_layer: Any, *, depth: int, mlp_layer: Any, **block_args: Any) -> nn.Module:
    """timm hands a block its index as `depth`; from `first` on, blocks get the MLP that broadcasts."""
    return Block(depth=depth, mlp_layer=upper_mlp_layer if depth >= first else mlp_layer, **block_args)


default_cfgs = generate_default_cfgs(
    {f"{name}_{size}.untrained": imagenet_cfg() for name in ("cb_vit", "cb_s_vit") for size in ("ti", "s", "b")}
)

_SIZES = {
    "ti": {"embed_dim": 192, "num_heads": 3},
    "s": {"embed_dim": 384, "num_heads": 6},
    "b": {"embed_dim": 768, "num_heads": 12},
}


def _create(variant: str, pretrained: bool, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    scaled = variant.startswith("cb_s_")
    defaults = {"broadcast": "cb_s", "layers": "all"} if scaled else {"broadcast": "cb", "layers": "upper"}
    return build_model_with_cfg(
        ContextBroadcastVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **{"patch_size": 16, **_SIZES[variant.rsplit("_", 1)[1]], **defaults, **kwargs},
    )


@register_model
def cb_vit_ti(pretrained: bool = False, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    """ViT-Ti + CB: 5.7 M parameters, 73.4 % top-1 as printed."""
    return _create("cb_vit_ti", pretrained, **kwargs)


@register_model
def cb_vit_s(pretrained: bool = False, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    """ViT-S + CB: 22 M parameters, 80.8 % top-1 as printed."""
    return _create("cb_vit_s", pretrained, **kwargs)


@register_model
def cb_vit_b(pretrained: bool = False, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    """ViT-B + CB: 87 M parameters, 82.1 % top-1 as printed."""
    return _create("cb_vit_b", pretrained, **kwargs)


@register_model
def cb_s_vit_ti(pretrained: bool = False, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    """ViT-Ti + CB_S: 5.7 M parameters, 73.5 % top-1 as printed."""
    return _create("cb_s_vit_ti", pretrained, **kwargs)


@register_model
def cb_s_vit_s(pretrained: bool = False, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    """ViT-S + CB_S: 22 M parameters, 80.4 % top-1 as printed."""
    return _create("cb_s_vit_s", pretrained, **kwargs)


@register_model
def cb_s_vit_b(pretrained: bool = False, **kwargs: Any) -> ContextBroadcastVisionTransformer:
    """ViT-B + CB_S: 87 M parameters, 82.1 % top-1 as printed."""
    return _create("cb_s_vit_b", pretrained, **kwargs)
