"""The pyramid's options: where it attends, how it merges, where positions and the class token enter."""

from typing import Any

import pytest
import torch
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.attention import GlobalAttention, SpatialReductionAttention
from vitrefine.layers.token_merging import DeformableTokenMerging, UniformTokenMerging
from vitrefine.models.pyramid import MERGING, PyramidTransformer, checkpoint_filter_fn


def small(**options: Any) -> PyramidTransformer:
    torch.manual_seed(0)
    defaults = {
        "img_size": 64,
        "embed_dims": (8, 12, 16, 24),
        "depths": (1, 2, 2, 1),
        "num_heads": (1, 2, 4, 4),
        "mlp_ratios": (2, 2, 2, 2),
        "num_classes": 5,
    }
    return PyramidTransformer(**{**defaults, **options}).eval()


def image(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 64)), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", [(0, 0, 1, 1), (1, 1, 1, 1), (8, 4, 2, 1), (0, 0, 0, 1), (0, 0, 0, 0)])
def test_where_it_attends(attention: tuple[int, ...]) -> None:
    model = small(attention=attention)
    for stage, kind in zip(model.stages, attention, strict=True):
        for block in stage.blocks:
            if kind == 0:
                assert block.attn is None
                assert block.norm1 is None
            elif kind == 1:
                assert isinstance(block.attn, GlobalAttention)
            else:
                assert isinstance(block.attn, SpatialReductionAttention)
                assert block.attn.sr.kernel_size == (kind, kind)
    assert model(image()).shape == (2, 5)


def test_taking_attention_out_keeps_the_names_of_the_rest() -> None:
    full, less = small(attention=(1, 1, 1, 1)).state_dict(), small(attention=(0, 0, 1, 1)).state_dict()
    assert less.keys() < full.keys()
    gone = full.keys() - less.keys()
    assert gone
    assert all(name.split(".")[1] in "01" and (".attn." in name or ".norm1." in name) for name in gone)
    small(attention=(0, 0, 1, 1)).load_state_dict({n: full[n] for n in less}, strict=True)


def test_a_block_without_attention_is_an_mlp_block() -> None:
    block = small().stages[0].blocks[0]
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(block(x, (2, 3)), x + block.mlp(block.norm2(x)))


def test_stages_without_attention_see_each_patch_alone() -> None:
    """Change one patch of 4×4 pixels: nothing else changes until tokens merge."""
    model = small(merging="conv")
    before, changed = image(), image()
    changed[:, :, 4:8, 8:12] += 1
    first = [model.forward_intermediates(x, intermediates_only=True)[0] for x in (before, changed)]
    differs = (first[0] - first[1]).abs().amax(dim=(0, 1)) > 0
    assert differs.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("merging", "kind"),
    [("deformable", DeformableTokenMerging), ("conv", UniformTokenMerging), ("swin", PatchMerging)],
)
@pytest.mark.parametrize("relative", [False, True])
def test_merging(merging: str, kind: type[nn.Module], relative: bool) -> None:
    assert MERGING.keys() == {"deformable", "conv", "swin"}
    model = small(merging=merging, relative=relative)
    assert isinstance(model.stages[0].merge, nn.Identity)
    assert all(isinstance(stage.merge, kind) for stage in model.stages[1:])
    maps = model.forward_intermediates(image(64, 96), intermediates_only=True)
    assert [tuple(m.shape[1:]) for m in maps] == [(8, 16, 24), (12, 8, 12), (16, 4, 6), (24, 2, 3)]


def test_absolute_positions_and_a_class_token_in_the_last_stage() -> None:
    model = small()
    assert [stage.pos_embed.shape[1] for stage in model.stages] == [256, 64, 16, 4 + 1]
    assert [stage.cls_token is not None for stage in model.stages] == [False, False, False, True]
    assert (model.global_pool, model.num_prefix_tokens) == ("token", 1)
    assert not any(name.endswith("table") for name, _ in model.named_parameters())
    tokens = model.forward_features(image())
    assert tokens.shape == (2, 5, 24)
    torch.testing.assert_close(model(image()), model.head(tokens[:, 0]))


def test_relative_positions_and_the_mean() -> None:
    model = small(relative=True)
    assert all(stage.pos_embed is None and stage.cls_token is None for stage in model.stages)
    assert (model.global_pool, model.num_prefix_tokens) == ("avg", 0)
    tables = {name: p.shape for name, p in model.named_parameters() if name.endswith("table")}
    assert tables == {
        "stages.2.blocks.0.attn.position.table": (49, 4),
        "stages.2.blocks.1.attn.position.table": (49, 4),
        "stages.3.blocks.0.attn.position.table": (9, 4),
    }
    tokens = model.forward_features(image())
    assert tokens.shape == (2, 4, 24)
    torch.testing.assert_close(model(image()), model.head(tokens.mean(dim=1)))


@pytest.mark.parametrize("last", [0, 2])
def test_no_class_token_where_the_last_stage_does_not_attend_to_it(last: int) -> None:
    model = small(attention=(1, 1, 1, last))
    assert model.stages[3].cls_token is None
    assert model.global_pool == "avg"
    assert model(image()).shape == (2, 5)


@pytest.mark.parametrize("pool", ["token", "avg", ""])
def test_pooling(pool: str) -> None:
    model = small(global_pool=pool)
    tokens = model.forward_features(image())
    pooled = {"token": tokens[:, 0], "avg": tokens[:, 1:].mean(dim=1), "": tokens}[pool]
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), pooled)


def test_no_patch_is_taken_for_a_class_token() -> None:
    with pytest.raises(UserError, match="global_pool=token needs a class token"):
        small(relative=True, global_pool="token")
    with pytest.raises(UserError, match="global_pool=token needs a class token"):
        (model := small(attention=(1, 1, 1, 0))).reset_classifier(3, "token")
    assert model.num_classes == 5


def test_the_norm_is_that_of_the_last_stage() -> None:
    model = small()
    tokens, maps = model.forward_intermediates(image(), indices=[1], norm=True, stop_early=True)
    torch.testing.assert_close(tokens.transpose(1, 2).unflatten(2, (8, 8)), maps[0])
    expected = model.forward_intermediates(image(), indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert model.num_classes == 0
    pruned = model.forward_intermediates(image(), norm=True, intermediates_only=True)
    for one, other in zip(pruned, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_positions_are_resized_at_run_time_as_on_loading() -> None:
    """Bicubic both times, so a model at a new size equals one that was loaded for that size."""
    for relative in (False, True):
        made, other = small(relative=relative), small(relative=relative, img_size=96)
        other.load_state_dict(checkpoint_filter_fn(made.state_dict(), other), strict=True)
        torch.testing.assert_close(other(image(96, 96)), made(image(96, 96)))


def test_stochastic_depth_grows_over_all_stages() -> None:
    model = small(drop_path_rate=0.5)
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_dropout_is_for_training() -> None:
    rates = {"attn_drop_rate": 0.3, "proj_drop_rate": 0.3, "drop_rate": 0.3}
    model, whole = small(**rates), small()
    torch.testing.assert_close(model(image()), whole(image()))
    model.train()
    assert not torch.allclose(model(image()), model(image()))


def test_nothing_decays_that_is_a_position() -> None:
    for model in (small(), small(relative=True)):
        positions = {n for n, _ in model.named_parameters() if "pos_embed" in n or "cls_token" in n or "table" in n}
        assert model.no_weight_decay() == positions


@pytest.mark.parametrize(
    ("size", "near"),
    [
        ((60, 64), "32x64 or 64x64"),
        ((64, 80), "64x64 or 64x96"),
        ((16, 64), "32x64"),
        ((100, 200), "96x192 or 128x224"),
    ],
)
def test_sizes_that_do_not_fit(size: tuple[int, int], near: str) -> None:
    sentence = f"{size[0]}x{size[1]} does not fit: each side must be a multiple of 32, as in {near}$"
    with pytest.raises(UserError, match=sentence):
        small()(image(*size))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"img_size": -32}, "-32x-32 does not fit"),
        ({"img_size": [64]}, r"img_size=\[64\] is no size of images; give one whole number, or height and width"),
        ({"img_size": 64.0}, "img_size=64.0 is no size"),
        ({"img_size": "large"}, "img_size=large is no size"),
        ({"attention": (-1, 0, 1, 1)}, "a stage has no attention -1; give 0 for none"),
        ({"attention": (0, 0.5, 1, 1)}, "a stage has no attention 0.5"),
        ({"attention": 1}, "attention=1 needs one entry for each of 4 stages"),
        ({"depths": (1, 1, 1)}, r"depths=\(1, 1, 1\) needs one entry"),
        ({"num_heads": (1, 2, 3, 4)}, "16 channels do not divide into 3 heads"),
        ({"merging": "pool"}, "no merging 'pool'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        small(**options)


def test_a_map_too_small_for_its_reduction() -> None:
    model = small(attention=(8, 8, 4, 1))
    assert model(image()).shape == (2, 5)
    with pytest.raises(UserError, match="a map of 4x8 has no keys when it is reduced 8 times; reduce it less"):
        model(image(32, 64))


def test_weights_made_for_an_oblong_image_say_so() -> None:
    for relative in (False, True):
        state = small(relative=relative, img_size=(64, 96)).state_dict()
        with pytest.raises(UserError, match="positions were made for images that are not square"):
            checkpoint_filter_fn(state, small(relative=relative))
