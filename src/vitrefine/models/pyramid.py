"""The four-stage pyramid that LIT and PVT share (LIT, Fig. 1): patches, then blocks and merging by turns.

What tells the models apart is data: which stages attend and how, how tokens merge, and where positions enter.
"""

from typing import Any

import torch
from timm.layers import get_device_dtype
from timm.models import build_model_with_cfg
from timm.models._features import feature_take_indices
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrefine.errors import UserError, check_choice
from vitrefine.layers.attention import GlobalAttention, SpatialReductionAttention
from vitrefine.layers.block import PyramidBlock
from vitrefine.layers.position import Grid, RelativePositionBias, resize_position
from vitrefine.layers.token_merging import DeformableTokenMerging, UniformTokenMerging
from vitrefine.models.sizes import check_size, image_size, square_side

STAGES = 4
POOLING, FORMATS = ("token", "avg", ""), ("NCHW", "NHWC")
MERGING: dict[str, Any] = {"deformable": DeformableTokenMerging, "conv": UniformTokenMerging, "swin": PatchMerging}


class PatchEmbedding(nn.Module):
    """One linear map a patch and a layer norm; gives NHWC."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, **factory: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size, **factory)
        self.norm = nn.LayerNorm(dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class PyramidStage(nn.Module):
    """Merging (but in the first stage), positions and class token where there are any, and the blocks."""

    def __init__(
        self,
        merge: nn.Module,
        blocks: list[nn.Module],
        *,
        dim: int,
        grid: Grid,
        absolute: bool,
        class_token: bool,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.grid, self.grad_checkpointing = grid, False
        self.merge = merge
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim, **factory)) if class_token else None
        tokens = grid[0] * grid[1] + class_token
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, dim, **factory)) if absolute else None
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """NHWC of the stage before to NHWC of this one, and all its tokens (class token included)."""
        x = self.merge(x)
        batch, height, width, _ = x.shape
        grid = (height, width)
        x = x.flatten(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(batch, -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = x + resize_position(self.pos_embed, self.grid, grid)
        for block in self.blocks:
            x = checkpoint(block, x, grid, use_reentrant=False) if self.grad_checkpointing else block(x, grid)
        return x[:, x.shape[1] - grid[0] * grid[1] :].unflatten(1, grid), x

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Have positions made for another grid."""
        if self.pos_embed is not None:
            resized = resize_position(self.pos_embed, self.grid, grid).clone()
            self.pos_embed = nn.Parameter(resized, self.pos_embed.requires_grad)
        for module in self.modules():
            if isinstance(module, RelativePositionBias):
                module.set_grid(grid)
        self.grid = grid


def _check_stages(**per_stage: Any) -> None:
    """Refuse lists that are not of one entry each stage, and entries that no stage can have."""
    for name, values in per_stage.items():
        if not isinstance(values, tuple | list) or len(values) != STAGES:
            raise UserError(f"{name}={values} needs one entry for each of {STAGES} stages")
    for dim, heads, kind in zip(*(per_stage[name] for name in ("embed_dims", "num_heads", "attention")), strict=True):
        if kind < 0 or kind != int(kind):
            raise UserError(f"a stage has no attention {kind}; give 0 for none, 1 for full, n for keys reduced n×n")
        if kind and dim % heads:
            raise UserError(f"{dim} channels do not divide into {heads} heads; change embed_dims or num_heads")


class PyramidTransformer(nn.Module):
    """A four-stage vision transformer.

    Args:
        img_size: Image that positions are made for; other sizes, non-square too, resize them.
        patch_size: Side of a patch; the image must be a multiple of eight patches each way.
        in_chans: Channels of the image.
        num_classes: Classes; 0 for none.
        global_pool: `token` (the class token), `avg` (mean over tokens), or "" for all tokens.
        embed_dims, depths, num_heads, mlp_ratios: One each stage.
        attention: One each stage: 0 no attention (LIT's MLP blocks), 1 full attention, n keys reduced n×n (PVT).
        merging: `deformable` (DTM), `conv` (PVT's) or `swin` (Swin's patch merging).
        relative: Relative position bias in the attention, instead of absolute embeddings at each stage's start.
        norm_eps: Epsilon of the layer norms in and after the blocks.
        qkv_bias: Bias of queries, keys and values.
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: Dropout of classifier, projections and maps;
            stochastic depth, growing linearly with depth.
    """

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str | None = None,
        embed_dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (3, 4, 6, 3),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        mlp_ratios: tuple[float, ...] = (8, 8, 4, 4),
        attention: tuple[int, ...] = (0, 0, 1, 1),
        merging: str = "deformable",
        relative: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_choice("merging", merging, MERGING)
        _check_stages(
            embed_dims=embed_dims, depths=depths, num_heads=num_heads, mlp_ratios=mlp_ratios, attention=attention
        )
        # A class token learns nothing where the last stage does not attend, and has no place on a map that is reduced:
        # there the mean has to do.
        class_token = not relative and attention[-1] == 1
        self.num_classes, self.in_chans, self.patch_size = num_classes, in_chans, patch_size
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dims[-1]
        self.num_prefix_tokens = int(class_token)
        height, width = self.img_size = image_size(img_size, 8 * patch_size)
        self.patch_embed = PatchEmbedding(in_chans, embed_dims[0], patch_size, **factory)

        drop_paths = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist()
        self.stages = nn.ModuleList()
        self.feature_info: list[dict[str, Any]] = []
        for i, (dim, depth) in enumerate(zip(embed_dims, depths, strict=True)):
            grid = (height // patch_size >> i, width // patch_size >> i)
            drops = {"attn_drop": attn_drop_rate, "proj_drop": proj_drop_rate, "qkv_bias": qkv_bias, **factory}
            blocks: list[nn.Module] = []
            for _ in range(depth):
                attn: nn.Module | None = None
                if attention[i] == 1:
                    attn = GlobalAttention(dim, num_heads[i], grid=grid if relative else None, **drops)
                elif attention[i] > 1:
                    attn = SpatialReductionAttention(dim, num_heads[i], reduction=attention[i], **drops)
                blocks.append(
                    PyramidBlock(
                        dim,
                        attn,
                        mlp_ratio=mlp_ratios[i],
                        norm_eps=norm_eps,
                        proj_drop=proj_drop_rate,
                        drop_path=drop_paths.pop(0),
                        **factory,
                    )
                )
            merge = MERGING[merging](embed_dims[i - 1], dim, **factory) if i else nn.Identity()
            last = i == len(depths) - 1
            self.stages.append(
                PyramidStage(
                    merge,
                    blocks,
                    dim=dim,
                    grid=grid,
                    absolute=not relative,
                    class_token=class_token and last,
                    **factory,
                )
            )
            self.feature_info.append({"num_chs": dim, "reduction": patch_size << i, "module": f"stages.{i}"})

        self.norm = nn.LayerNorm(embed_dims[-1], eps=norm_eps, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Identity()
        self.global_pool = "token" if class_token else "avg"
        self.reset_classifier(num_classes, global_pool)
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal for linear layers, positions and the class token."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, PyramidStage):
                for embedding in (module.pos_embed, module.cls_token):
                    if embedding is not None:
                        nn.init.trunc_normal_(embedding, std=0.02)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {n for n, _ in self.named_parameters() if n.endswith(("pos_embed", "cls_token", "position.table"))}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        block = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.blocks\.(\d+)"
        return {"stem": r"^patch_embed", "blocks": [(block, None), (r"^stages\.(\d+)", (0,)), (r"^norm", (99999,))]}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def set_input_size(self, img_size: int | Grid) -> None:
        """Have positions made for images of another size; outputs stay what they were."""
        height, width = self.img_size = image_size(img_size, 8 * self.patch_size)
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, PyramidStage)
            stage.set_grid((height // self.patch_size >> i, width // self.patch_size >> i))

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        global_pool = self.global_pool if global_pool is None else global_pool
        check_choice("global_pool", global_pool, POOLING)
        if global_pool == "token" and not self.num_prefix_tokens:
            raise UserError("global_pool=token needs a class token, which this pyramid has not; take avg")
        self.num_classes, self.global_pool = num_classes, global_pool
        like = get_device_dtype(self)
        self.head = nn.Linear(self.num_features, num_classes, **like) if num_classes else nn.Identity()

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps at the end of the stages asked for; arguments as timm's."""
        check_choice("format of features", output_fmt, FORMATS)
        take, last = feature_take_indices(len(self.stages), indices)
        maps: list[Tensor] = []
        check_size(x.shape[-2], x.shape[-1], 8 * self.patch_size)
        x = tokens = self.patch_embed(x)
        end = len(self.stages) - 1
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x, tokens = stage(x)
            if i in take:
                out = self.norm(x) if norm and i == end else x
                maps.append(out.permute(0, 3, 1, 2) if output_fmt == "NCHW" else out)
        if intermediates_only:
            return maps
        return (tokens if stop_early and last < end else self.norm(tokens)), maps  # the norm is of the last stage

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the stages asked for do not need."""
        take, last = feature_take_indices(len(self.stages), indices)
        if prune_norm or last + 1 < len(self.stages):  # the norm is of the last stage
            self.norm = nn.Identity()  # type: ignore[assignment]
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0)
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """All tokens of the last stage, normalised; the class token first where there is one."""
        check_size(x.shape[-2], x.shape[-1], 8 * self.patch_size)
        x = tokens = self.patch_embed(x)
        for stage in self.stages:
            x, tokens = stage(x)
        return self.norm(tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def checkpoint_filter_fn(state: dict[str, Tensor], model: PyramidTransformer) -> dict[str, Tensor]:
    """Weights made for square images of another size: positions and relative tables resized bicubically."""
    state = dict(state)
    for prefix, module in model.named_modules():
        embedding, table = f"{prefix}.pos_embed", f"{prefix}.table"
        if isinstance(module, PyramidStage) and module.pos_embed is not None and embedding in state:
            state[embedding] = _fit(state[embedding], module.pos_embed, module.grid)
        elif isinstance(module, RelativePositionBias) and table in state:
            displacements = (2 * module.built_for[0] - 1, 2 * module.built_for[1] - 1)
            state[table] = _fit(state[table][None], module.table[None], displacements)[0]
    return state


def _fit(position: Tensor, own: Tensor, grid: Grid) -> Tensor:
    if position.shape == own.shape:
        return position
    side = square_side(position.shape[1] - (own.shape[1] - grid[0] * grid[1]))
    return resize_position(position, (side, side), grid)


def create_pyramid(variant: str, pretrained: bool, defaults: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    """Build through timm, so that `features_only`, `out_indices` and pretrained loading work as they do there."""
    return build_model_with_cfg(
        PyramidTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        **{**defaults, **kwargs},
    )
