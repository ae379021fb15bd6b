"""Refined-ViT (Zhou et al.), Table 10: a deep, narrow ViT with a convolutional stem and refined, shared maps.

`variant="official"` is the authors' code: x += 2·Attn(LN(x/2)), x += 2·s⊙MLP(LN(x/2)) with s from 1e-5, batch norms
and ReLU6 in the refiner, maps handed on unrefined. `variant="paper"` is the paper's text: plain pre-norm blocks and
a linear refiner. The S, M and L models are official unless told otherwise; Base exists in the paper alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerScale, Mlp, get_device_dtype
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrefine.errors import UserError, check_choice
from vitrefine.layers.position import Grid, resize_position
from vitrefine.layers.refined_attention import OfficialRefinedAttention, RefinedAttention
from vitrefine.layers.stem import ConvStem, LinearStem
from vitrefine.models.config import imagenet_cfg
from vitrefine.models.intermediates import Intermediates, arrange, check_format
from vitrefine.models.sizes import check_size, image_size, square_side
from vitrefine.models.token_labels import mix_tokens, random_box, unmix_tokens

VARIANTS = ("official", "paper")
STEMS = {"conv": ConvStem, "linear": LinearStem}
POOLING = ("token", "avg", "")


class RefinedBlock(nn.Module):
    """Attention and MLP on tokens divided by `skip`, added back times `skip`; hands attention maps on."""

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        *,
        mlp_ratio: float,
        skip: float,
        mlp_scale: float | None,
        proj_drop: float,
        drop_path: float,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.skip = skip
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, **factory)
        self.ls2 = nn.Identity() if mlp_scale is None else LayerScale(dim, mlp_scale, **factory)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, maps: Tensor | None = None, **attend: Any) -> tuple[Tensor, Tensor | None]:
        out, maps = self.attn(self.norm1(x / self.skip), maps, **attend)
        x = x + self.skip * self.drop_path(out)
        x = x + self.skip * self.drop_path(self.ls2(self.mlp(self.norm2(x / self.skip))))
        return x, maps


class RefinedVisionTransformer(nn.Module):
    """A ViT with refined attention maps.

    Args:
        img_size: Image that positions are made for; other sizes, non-square too, resize them.
        patch_size: Side of a patch, even for the convolutional stem; the image must be a multiple of it.
        in_chans: Channels of the image.
        num_classes: Classes; 0 for none.
        global_pool: `token` (the class token), `avg` (mean over patches), or "" for all tokens.
        embed_dim, depth, num_heads, mlp_ratio: Size.
        qkv_bias: Bias of queries, keys and values.
        variant: `official` or `paper`; see the head of this file.
        share: How many blocks after each block with maps of its own use those maps again.
        expansion, kernel_size, reduction, constraint: See `Refiner`; `kernel_size` 3, reduction and no constraint
            are all that the official variant has, and its expansion is that of `refine_own` alone: shared maps have 3.
        refine_own: Official variant: refine maps in the block that makes them, too.
        stem: `conv` or `linear`.
        token_labels: A second classifier on patch tokens, for token labelling. In evaluation the logits are
            cls + ½ max over patches; in training the model returns (cls, patches, box), the box being that of
            mix-token in patches (top, left, bottom, right).
        mix_token: In training with token labels, swap a random box of patches between images.
        drop_rate, pos_drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: Dropout of classifier, embeddings,
            projections and maps; stochastic depth, growing linearly with depth.
    """

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 384,
        depth: int = 16,
        num_heads: int = 12,
        mlp_ratio: float = 3,
        qkv_bias: bool = True,
        variant: str = "official",
        share: int = 1,
        expansion: float = 3,
        kernel_size: int = 3,
        reduction: bool = True,
        constraint: str = "none",
        refine_own: bool = False,
        stem: str = "conv",
        token_labels: bool = False,
        mix_token: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("variant", variant, VARIANTS)
        check_choice("stem", stem, STEMS)
        if variant == "official" and (kernel_size, reduction, constraint) != (3, True, "none"):
            raise UserError("kernel_size, reduction and constraint are options of variant=paper; add variant=paper")
        if variant == "official" and expansion != 3 and not refine_own:
            raise UserError("expansion is an option of variant=paper and of refine_own=True; shared maps always have 3")
        if variant == "paper" and refine_own:
            raise UserError("refine_own is an option of variant=official; variant=paper refines own maps in any case")
        if share < 0 or share != int(share):
            raise UserError(f"share={share} is no number of blocks; 0 has every block make its own maps")
        if embed_dim % num_heads:
            raise UserError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans, self.patch_size = num_classes, in_chans, patch_size
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.global_pool, self.num_prefix_tokens, self.grad_checkpointing = global_pool, 1, False
        self.mix_token = mix_token
        height, width = self.img_size = image_size(img_size, patch_size)
        self.grid = (height // patch_size, width // patch_size)

        self.patch_embed = STEMS[stem](in_chans, embed_dim, patch_size, **factory)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim, **factory))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], embed_dim, **factory))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.needs_grid = constraint == "spatial"
        attention: Callable[..., nn.Module]
        if variant == "paper":
            attention = partial(
                RefinedAttention,
                hands_on=share > 0,
                expansion=expansion,
                kernel_size=kernel_size,
                reduction=reduction,
                constraint=constraint,
            )
        else:
            attention = partial(OfficialRefinedAttention, refine_own=refine_own, expansion=expansion)
        drop_paths = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(
            RefinedBlock(
                embed_dim,
                attention(
                    embed_dim,
                    num_heads,
                    shared=i % (share + 1) > 0,
                    qkv_bias=qkv_bias,
                    attn_drop=attn_drop_rate,
                    proj_drop=proj_drop_rate,
                    **factory,
                ),
                mlp_ratio=mlp_ratio,
                skip=2.0 if variant == "official" else 1.0,
                mlp_scale=1e-5 if variant == "official" else None,
                proj_drop=proj_drop_rate,
                drop_path=drop_paths[i],
                **factory,
            )
            for i in range(depth)
        )
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)
        ]
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.token_labels = token_labels
        self.head: nn.Module = nn.Identity()
        self.aux_head: nn.Module | None = None
        self.reset_classifier(num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal for linear layers, positions and the class token."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.no_grad()
    def set_input_size(self, img_size: int | Grid) -> None:
        """Have positions made for images of another size; outputs stay what they were."""
        height, width = self.img_size = image_size(img_size, self.patch_size)
        grid = (height // self.patch_size, width // self.patch_size)
        resized = resize_position(self.pos_embed, self.grid, grid, mode="bilinear").clone()
        self.pos_embed = nn.Parameter(resized, self.pos_embed.requires_grad)
        self.grid = grid

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        global_pool = self.global_pool if global_pool is None else global_pool
        check_choice("global_pool", global_pool, POOLING)
        if self.token_labels and num_classes and not global_pool:
            raise UserError("token_labels adds logits of patches to those of an image; take global_pool token or avg")
        self.num_classes, self.global_pool = num_classes, global_pool
        like = get_device_dtype(self)
        self.head = nn.Linear(self.num_features, num_classes, **like) if num_classes else nn.Identity()
        self.aux_head = nn.Linear(self.num_features, num_classes, **like) if self.token_labels and num_classes else None

    def _embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Patches as NHWC, positions not added yet."""
        check_size(x.shape[-2], x.shape[-1], self.patch_size)
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        return x, (x.shape[1], x.shape[2])

    def _enter(self, patches: Tensor, grid: Grid) -> Tensor:
        x = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches.flatten(1, 2)], dim=1)
        return self.pos_drop(x + resize_position(self.pos_embed, self.grid, grid, mode="bilinear"))

    def _attend(self, x: Tensor, grid: Grid, blocks: nn.ModuleList, keep: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Run the blocks, keeping the tokens that leave those whose index is in `keep`."""
        maps: Tensor | None = None
        kept: list[Tensor] = []
        options: dict[str, Any] = {"grid": grid} if self.needs_grid else {}
        for i, block in enumerate(blocks):
            if self.grad_checkpointing:
                x, maps = checkpoint(block, x, maps, use_reentrant=False, **options)
            else:
                x, maps = block(x, maps, **options)
            if i in keep:
                kept.append(x)
        return x, kept

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
    ) -> Intermediates:
        """Tokens or maps at the end of the blocks asked for; arguments and results as in timm's ViT."""
        check_format(output_fmt)
        take, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self._embed(x)
        x, kept = self._attend(self._enter(x, grid), grid, self.blocks[: last + 1] if stop_early else self.blocks, take)
        return arrange(
            [self.norm(tokens) for tokens in kept] if norm else kept,
            None if intermediates_only else self.norm(x),
            grid,
            self.num_prefix_tokens,
            return_prefix_tokens=return_prefix_tokens,
            output_fmt=output_fmt,
            output_dict=output_dict,
        )

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the blocks asked for do not need."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]
        if prune_head:
            self.reset_classifier(0)
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """All tokens after the last norm, the class token first."""
        x, grid = self._embed(x)
        return self.norm(self._attend(self._enter(x, grid), grid, self.blocks, [])[0])

    def pool(self, x: Tensor) -> Tensor:
        """What the classifier sees of the tokens."""
        if self.global_pool == "avg":
            return x[:, 1:].mean(dim=1)
        return x[:, 0] if self.global_pool == "token" else x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = self.head_drop(self.pool(x))
        if pre_logits or self.aux_head is None:
            return pooled if pre_logits else self.head(pooled)
        return self.head(pooled) + 0.5 * self.aux_head(x[:, 1:]).amax(dim=1)

    def forward(self, x: Tensor) -> Any:
        if self.aux_head is None or not self.training:
            return self.forward_head(self.forward_features(x))
        patches, grid = self._embed(x)
        box = random_box(grid, device=x.device) if self.mix_token else torch.zeros(4, dtype=torch.long, device=x.device)
        patches = mix_tokens(patches, box)
        tokens = self.norm(self._attend(self._enter(patches, grid), grid, self.blocks, [])[0])
        aux = unmix_tokens(self.aux_head(tokens[:, 1:]).unflatten(1, grid), box)
        return self.head(self.head_drop(self.pool(tokens))), aux.flatten(1, 2), box


def checkpoint_filter_fn(state: dict[str, Tensor], model: RefinedVisionTransformer) -> dict[str, Tensor]:
    """Weights made for square images of another size: positions resized bicubically, as the authors do on loading."""
    position = state.get("pos_embed")
    if position is None or position.shape == model.pos_embed.shape:
        return state
    side = square_side(position.shape[1] - model.num_prefix_tokens)
    return {**state, "pos_embed": resize_position(position, (side, side), model.grid)}


def _cfg(crop_pct: float, first_conv: str = "patch_embed.convs.0") -> dict[str, Any]:
    half = (0.5, 0.5, 0.5)
    ends = {"first_conv": first_conv, "classifier": ("head", "aux_head")}  # both are new for other classes
    return imagenet_cfg(crop_pct=crop_pct, mean=half, std=half, **ends)


default_cfgs = generate_default_cfgs(
    {
        "refined_vit_s.untrained": _cfg(0.9),
        "refined_vit_m.untrained": _cfg(1.0),
        "refined_vit_l.untrained": _cfg(1.13),
        "refined_vit_base.untrained": _cfg(0.9, first_conv="patch_embed.proj"),
    }
)


def _create(name: str, pretrained: bool, defaults: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    out_indices = kwargs.pop("out_indices", 3)
    options = {"variant": "official", **defaults, **kwargs}
    return build_model_with_cfg(
        # timm's builder has a `variant` of its own, the model's name: ours goes in beforehand.
        partial(RefinedVisionTransformer, variant=options.pop("variant")),
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **options,
    )


@register_model
def refined_vit_s(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Refined-ViT-S: 16 blocks of 384, every second one shares its neighbour's maps."""
    return _create("refined_vit_s", pretrained, {"embed_dim": 384, "depth": 16, "num_heads": 12}, kwargs)


@register_model
def refined_vit_m(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Refined-ViT-M: 32 blocks of 420."""
    return _create("refined_vit_m", pretrained, {"embed_dim": 420, "depth": 32, "num_heads": 12}, kwargs)


@register_model
def refined_vit_l(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Refined-ViT-L: 32 blocks of 512, 16 heads."""
    return _create("refined_vit_l", pretrained, {"embed_dim": 512, "depth": 32, "num_heads": 16}, kwargs)


@register_model
def refined_vit_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Refined-ViT-Base: ViT-B with a refiner in every block (paper form, linear stem, nothing shared)."""
    defaults = {
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "mlp_ratio": 4,
        "variant": "paper",
        "share": 0,
        "stem": "linear",
    }
    return _create("refined_vit_base", pretrained, defaults, kwargs)
