"""LocalViT-Ti: DeiT-Ti whose feed-forward is an inverted residual (Li et al., 2021, LocalViT; CB, Table S14).

    x   ← x + Attn(LN(x))                                                        every token
    P   ← P + BN(1×1 SE(h(BN(dw 3×3 h(BN(1×1 P))))))     h: h-swish             patch tokens, on their grid
    x_0 ← x_0                                                                    the class token passes by

Where the paper is silent this follows the authors' code: four heads, no norm before the convolutions and no biases in
them, a squeeze-excitation of four channels with a hard sigmoid, no stochastic depth on the second branch. That gives
the printed 5.9 M (5,908,696; without the squeeze-excitation 5,825,704) and 1.3 G.
The inverted residual is timm's, from the EfficientNet family.
"""

from functools import partial
from typing import Any

import torch
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._efficientnet_blocks import InvertedResidual, SqueezeExcite
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.models.config import imagenet_cfg
from vitrefine.models.intermediates import Intermediates, arrange, check_format

SQUEEZE_CHANNELS = 4


class LocalFeedForward(InvertedResidual):
    """The feed-forward on a map of patches, (B, C, H, W) in and out, without its residual: the block adds that.

    Args:
        in_features: Channels C.
        hidden_features: Channels of the depthwise convolution.
        act_layer: Activation after the first two convolutions.
        device: Where to put the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        act_layer: type[nn.Module] = nn.Hardswish,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        squeeze: Any = partial(
            SqueezeExcite, rd_channels=SQUEEZE_CHANNELS, force_act_layer=nn.ReLU, gate_layer="hard_sigmoid"
        )
        super().__init__(
            in_features,
            in_features,
            exp_ratio=hidden_features / in_features,
            act_layer=act_layer,
            se_layer=squeeze,
            noskip=True,
            device=device,
            dtype=dtype,
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Start the squeeze-excitation as the authors' linear layers start; timm's are convolutions."""
        for name, parameter in self.se.named_parameters():
            if name.endswith("weight"):
                nn.init.trunc_normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)


def _local_feed_forward(
    *,
    in_features: int,
    hidden_features: int,
    act_layer: type[nn.Module],
    norm_layer: Any,
    bias: bool,
    drop: float,
    **dd: Any,
) -> LocalFeedForward:
    """Called as timm's block calls an MLP, whose norm, biases and dropout the authors' convolutions do not have."""
    return LocalFeedForward(in_features, hidden_features, act_layer, **dd)


class LocalVitBlock(Block):
    """timm's block whose second branch sees the patches as an image; takes their grid beside the tokens.

    Args:
        dim: Channels.
        num_heads: Heads.
        **block_args: The other arguments of timm's block; `mlp_layer` is set here.
    """

    def __init__(self, dim: int, num_heads: int, **block_args: Any) -> None:
        block_args = {"act_layer": nn.Hardswish, **block_args, "mlp_layer": _local_feed_forward}
        super().__init__(dim, num_heads, **block_args)
        self.norm2 = nn.Identity()
        self.drop_path2 = nn.Identity()

    def forward(  # type: ignore[override]
        self, x: Tensor, grid: tuple[int, int], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        prefix, patches = x.split([x.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)
        local = self.mlp(self.norm2(patches).transpose(1, 2).unflatten(2, grid))
        patches = patches + self.drop_path2(self.ls2(local.flatten(2).transpose(1, 2)))
        return torch.cat([prefix, patches], dim=1)


class LocalVisionTransformer(VisionTransformer):
    """timm's ViT made of `LocalVitBlock`s.

    The grid goes to each block as an argument, which timm's loops over blocks have no place for: hence the two
    methods that run blocks are here. Batch norms count a batch twice under gradient checkpointing, as in any model.

    Args:
        **vit_args: Arguments of `timm.models.VisionTransformer`. The image size is dynamic unless they say otherwise:
            an image is padded to whole patches, and position embeddings are resampled to fit it.
    """

    def __init__(self, **vit_args: Any) -> None:
        if vit_args.get("patch_drop_rate", 0.0) > 0:
            raise UserError("LocalViT convolves the whole grid of patches: leave patch_drop_rate at 0")
        vit_args = {"dynamic_img_size": True, "dynamic_img_pad": True, "act_layer": nn.Hardswish, **vit_args}
        super().__init__(block_fn=LocalVitBlock, **vit_args)

    def _embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        grid = self.patch_embed.dynamic_feat_size(images.shape[-2:])
        return self.norm_pre(self._pos_embed(self.patch_embed(images))), grid

    def _run_block(
        self, block: nn.Module, x: Tensor, grid: tuple[int, int], attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint(block, x, grid, attn_mask, is_causal)
        return block(x, grid, attn_mask, is_causal)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x, grid = self._embed(x)
        for block in self.blocks:
            x = self._run_block(block, x, grid, attn_mask, is_causal)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Intermediates:
        """Tokens after the last block and after those asked for; arguments and results as in timm's ViT."""
        check_format(output_fmt)
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self._embed(x)
        outputs = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run_block(block, x, grid, attn_mask, is_causal)
            if index in taken:
                outputs.append(self.norm(x) if norm else x)
        return arrange(
            outputs,
            None if intermediates_only else self.norm(x),
            grid,
            self.num_prefix_tokens,
            return_prefix_tokens=return_prefix_tokens,
            output_fmt=output_fmt,
            output_dict=output_dict,
        )


default_cfgs = generate_default_cfgs({"localvit_ti.untrained": imagenet_cfg()})


@register_model
def localvit_ti(pretrained: bool = False, **kwargs: Any) -> LocalVisionTransformer:
    """LocalViT-Ti: 5.9 M parameters; 74.8 % top-1 in its paper, 69.4 % (150 epochs) in that of CB."""
    return build_model_with_cfg(
        LocalVisionTransformer,
        "localvit_ti",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **{"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 4, **kwargs},
    )
