"""Refined-ViT's own options: sharing, variants, token labels and mix-token."""

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.models.refined_vit import RefinedVisionTransformer, checkpoint_filter_fn
from vitrefine.models.token_labels import mix_tokens, random_box, unmix_tokens


def small(**options: Any) -> RefinedVisionTransformer:
    torch.manual_seed(0)
    defaults = {"img_size": 64, "embed_dim": 24, "depth": 6, "num_heads": 4, "num_classes": 5}
    return RefinedVisionTransformer(**{**defaults, **options}).eval()


def images(count: int = 4, size: tuple[int, int] = (64, 64)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize(("share", "owners"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 2, 4]), (2, [0, 3]), (5, [0])])
def test_sharing(variant: str, share: int, owners: list[int]) -> None:
    model = small(variant=variant, share=share)
    assert [i for i, block in enumerate(model.blocks) if not block.attn.shared] == owners
    for block in model.blocks:
        names = {name.partition(".")[0] for name, _ in block.attn.named_parameters()}
        assert ("v" if block.attn.shared else "qkv") in names
        assert len(names & {"v", "qkv"}) == 1
    assert model(images()).isfinite().all()


def test_paper_blocks_share_refined_maps_until_the_next_owner() -> None:
    model = small(variant="paper", share=2)
    maps: list[Any] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, output: maps.append(output[1]))
    model(images())
    assert maps[0] is maps[1] is maps[2]
    assert maps[3] is maps[4] is maps[5]
    assert not torch.equal(maps[0], maps[3])


def test_paper_blocks_that_share_nothing_keep_no_maps() -> None:
    model = small(variant="paper", share=0)
    kept: list[Any] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, output: kept.append(output[1]))
    model(images())
    assert kept == [None] * 6


def test_official_maps_are_handed_all_the_way() -> None:
    """A later owner adds the maps before it, so the first block's queries reach the last block's maps."""
    model = small()
    model.blocks[2].attn.qkv.weight.data.zero_()
    maps: list[Tensor] = []
    model.blocks[2].attn.register_forward_hook(lambda module, args, output: maps.append(output[1]))
    model.blocks[0].attn.register_forward_hook(lambda module, args, output: maps.append(output[1]))
    model(images())
    first, third = maps
    torch.testing.assert_close(third, first * 6**-0.5 + 1 / 17)


def test_paper_form_starts_as_a_plain_vit() -> None:
    """Without sharing and with the linear stem, Refined-ViT is a ViT plus refiners that start as the identity."""
    model = small(variant="paper", share=0, stem="linear", mlp_ratio=4)
    plain = VisionTransformer(img_size=64, embed_dim=24, depth=6, num_heads=4, num_classes=5).eval()
    state = model.state_dict()
    missing = plain.load_state_dict({n: t for n, t in state.items() if ".refiner." not in n}, strict=True)
    assert not missing.missing_keys
    torch.testing.assert_close(model(images()), plain(images()), rtol=0, atol=1e-5)


def test_official_branches_are_doubled_on_halved_tokens() -> None:
    model = small(depth=1)
    block = model.blocks[0]
    x = torch.randn(2, 17, 24)
    after = x + 2 * block.attn(block.norm1(x / 2))[0]
    after = after + 2 * block.ls2.gamma * block.mlp(block.norm2(after / 2))
    torch.testing.assert_close(block(x)[0], after)
    assert block.ls2.gamma.eq(1e-5).all()
    assert isinstance(small(variant="paper").blocks[0].ls2, nn.Identity)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"variant": "third"}, "no variant 'third'; choose one of official, paper"),
        ({"kernel_size": 5}, "options of variant=paper; add variant=paper"),
        ({"reduction": False}, "options of variant=paper"),
        ({"constraint": "spatial"}, "options of variant=paper"),
        ({"embed_dim": 26}, "embed_dim=26 is not divisible by num_heads=4"),
        ({"img_size": 70}, "70x70 does not fit: each side must be a multiple of 16, as in 64x64 or 80x80"),
        ({"variant": "paper", "constraint": "diagonal"}, "no constraint 'diagonal'"),
        ({"expansion": 2}, "expansion is an option of variant=paper and of refine_own=True"),
        ({"share": 1.5}, "share=1.5 is no number of blocks"),
        ({"variant": "paper", "refine_own": True}, "refine_own is an option of variant=official"),
        ({"share": -1}, "share=-1 is no number of blocks"),
        ({"img_size": 63, "patch_size": 7}, "patch_size=7 has to be even"),
        ({"token_labels": True, "global_pool": ""}, "take global_pool token or avg"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        small(**options)


def test_options_reach_the_refiner_through_timm() -> None:
    model = timm.create_model(
        "refined_vit_s", embed_dim=24, depth=2, num_heads=4, variant="paper", share=0, expansion=2, kernel_size=5
    )
    assert {block.attn.refiner.kernel_size for block in model.blocks} == {5}
    assert {block.attn.refiner.hidden for block in model.blocks} == {8}


def test_spatial_constraint_follows_the_image() -> None:
    """A grid of 2×8 and one of 4×4 have equally many patches; the kernel has to tell them apart."""
    model = small(variant="paper", constraint="spatial", share=1)
    for block in model.blocks[::2]:
        nn.init.normal_(block.attn.refiner.local)
    wide, square = images(size=(32, 128)), images()
    assert model(wide).isfinite().all()
    tokens = model._enter(torch.randn(1, 4, 4, 24), (4, 4))
    one, _ = model._attend(tokens, (4, 4), model.blocks, [])
    other, _ = model._attend(tokens, (2, 8), model.blocks, [])
    assert not torch.allclose(one, other)
    assert model(square).shape == (4, 5)


def test_weights_made_for_an_oblong_image_say_so() -> None:
    state = small(img_size=(64, 96)).state_dict()
    assert checkpoint_filter_fn(state, small(img_size=(64, 96))) is state
    with pytest.raises(UserError, match="24 positions were made for images that are not square"):
        checkpoint_filter_fn(state, small())


@pytest.mark.parametrize("pool", ["token", "avg", ""])
def test_pooling(pool: str) -> None:
    model = small(global_pool=pool)
    tokens = model.forward_features(images())
    pooled = {"token": tokens[:, 0], "avg": tokens[:, 1:].mean(dim=1), "": tokens}[pool]
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), pooled)
    torch.testing.assert_close(model(images()), model.head(pooled))


def test_stochastic_depth_grows() -> None:
    rates = [block.drop_path.drop_prob for block in small(drop_path_rate=0.1).blocks]
    assert rates == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1])


# Token labels


def test_token_labels_in_evaluation() -> None:
    model = small(token_labels=True)
    tokens = model.forward_features(images())
    expected = model.head(tokens[:, 0]) + 0.5 * model.aux_head(tokens[:, 1:]).max(dim=1).values
    torch.testing.assert_close(model(images()), expected)
    model.reset_classifier(3)
    assert model.aux_head.out_features == 3
    model.reset_classifier(0)
    assert model.aux_head is None


def test_token_labels_keep_to_the_pooling() -> None:
    model = small(token_labels=True, global_pool="avg", depth=2).train()
    seen: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: tokens.append(output))
    model(images())
    torch.testing.assert_close(seen[0], tokens[0][:, 1:].mean(dim=1))
    with pytest.raises(UserError, match="take global_pool token or avg"):
        model.reset_classifier(3, "")
    assert (model.num_classes, model.global_pool) == (5, "avg")
    model.reset_classifier(0, "")


def without_mixing_blocks(**options: Any) -> RefinedVisionTransformer:
    """A model in training whose blocks do nothing, so that a patch's logits depend on that patch alone."""
    model = small(token_labels=True, depth=2, **options).train()
    for block in model.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


def seed_with_a_proper_box() -> int:
    for seed in range(100):
        torch.manual_seed(seed)
        top, left, bottom, right = random_box((4, 4)).tolist()
        if 0 < (bottom - top) * (right - left) < 16:
            return seed
    raise AssertionError("no seed gives a box")


def test_unmixed_logits_belong_to_their_own_patches() -> None:
    whole = without_mixing_blocks()(images())
    model = without_mixing_blocks(mix_token=True)
    torch.manual_seed(seed_with_a_proper_box())
    _, aux, box = model(images())
    top, left, bottom, right = box.tolist()
    assert 0 < (bottom - top) * (right - left) < 16
    assert aux.shape == (4, 16, 5)
    torch.testing.assert_close(aux, whole[1])


def test_patches_in_the_box_are_swapped_before_the_blocks() -> None:
    model = without_mixing_blocks(mix_token=True)
    entered: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    torch.manual_seed(seed_with_a_proper_box())
    box = model(images())[2]
    model.mix_token = False
    model(images())
    mixed, plain = (tokens[:, 1:].unflatten(1, (4, 4)) for tokens in entered)
    row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    inside = (row >= box[0]) & (row < box[2]) & (column >= box[1]) & (column < box[3])
    torch.testing.assert_close(mixed[:, ~inside], plain[:, ~inside])
    torch.testing.assert_close(mixed[:, inside], plain.flip(0)[:, inside])


def test_mixing_is_for_training_with_token_labels() -> None:
    mixing, plain = small(token_labels=True, mix_token=True), small(token_labels=True)
    torch.testing.assert_close(mixing(images()), plain(images()))
    assert small(mix_token=True).train()(images()).shape == (4, 5)


def test_seeds_make_mixing_reproducible() -> None:
    model = small(token_labels=True, mix_token=True).train()

    def run(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(seed)
        return model(images())

    for first, second in zip(run(3), run(3), strict=True):
        assert torch.equal(first, second)
    assert len({tuple(run(seed)[2].tolist()) for seed in range(8)}) > 1


@pytest.mark.parametrize("grid", [(14, 14), (4, 9), (1, 1)])
def test_boxes_lie_inside_the_grid(grid: tuple[int, int]) -> None:
    areas = []
    for seed in range(300):
        torch.manual_seed(seed)
        top, left, bottom, right = random_box(grid).tolist()
        assert 0 <= top <= bottom <= grid[0]
        assert 0 <= left <= right <= grid[1]
        areas.append((bottom - top) * (right - left) / (grid[0] * grid[1]))
    if grid == (14, 14):
        assert min(areas) == 0
        assert max(areas) > 0.6
        # A box with a uniform share of the area loses a part of it at the edges.
        assert 0.2 < sum(areas) / len(areas) < 0.5


def test_swapping_twice_restores() -> None:
    patches, box = torch.randn(3, 4, 5, 2), torch.tensor([1, 0, 3, 4])
    mixed = mix_tokens(patches, box)
    assert not torch.equal(mixed, patches)
    assert torch.equal(mixed[1], patches[1]), "the middle image of an odd batch is opposite itself"
    assert torch.equal(unmix_tokens(mixed, box), patches)
