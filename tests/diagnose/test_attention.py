"""Captured attention is the attention that was computed, whatever the model; entropies and maps by construction."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
from torch import nn

import vitrefine
from vitrefine.diagnose.attention import attention_entropy, attention_map
from vitrefine.diagnose.capture import capture
from vitrefine.diagnose.measures import row_entropy
from vitrefine.errors import UserError
from vitrefine.surgery.census import disturb

SWIN = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "vit_tiny_patch16_224+refiner+cb_s": {"img_size": 64, "depth": 2},
    "vit_tiny_patch16_224+refiner(share=1)": {"img_size": 64, "depth": 2},
    "vit_tiny_patch16_224+uniform_head": {"img_size": 64, "depth": 2},
    "vit_tiny_patch16_dinov3_qkvb": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": SWIN,
    "swin_tiny_patch4_window7_224+refiner": SWIN,
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "mvitv2_tiny": {"img_size": 64},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "refined_vit_s": {"img_size": 64},
    "lit_ti": {"img_size": 64},
}


def made(spec: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    arguments = MODELS[spec]
    size = arguments.get("img_size", 64)
    return disturb(vitrefine.create(spec, **arguments).eval()), torch.randn(2, 3, size, size)


@pytest.mark.parametrize("spec", MODELS)
def test_every_attention_is_caught_and_the_model_is_left_as_it_was(spec: str) -> None:
    model, images = made(spec)
    kinds, attributes = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    with torch.no_grad():
        before = model(images)
        with capture(model) as attentions:
            assert torch.equal(model(images), before)
    assert len(attentions) > 0
    for attention in attentions:
        (call,) = attention.calls
        maps = call.maps()
        assert maps.shape[1] == attention.heads
        if call.proper:  # handed-on maps are sums of several
            torch.testing.assert_close(maps.sum(dim=-1), torch.ones(maps.shape[:-1]))
    assert kinds == [type(m) for m in model.modules()]
    assert attributes == [set(vars(m)) for m in model.modules()]
    with torch.no_grad():
        assert torch.equal(model(images), before)


def test_maps_are_those_that_hooks_would_see() -> None:
    """timm's un-fused ViT drops its maps through a module, where a hook finds them; the fused one shows nothing."""
    model, images = made("vit_tiny_patch16_224")
    seen: list[torch.Tensor] = []
    plain: Any = copy.deepcopy(model)
    for block in plain.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad(), capture(model) as attentions:
        model(images)
        plain(images)
    for attention, maps in zip(attentions, seen, strict=True):
        torch.testing.assert_close(attention.calls[0].maps(), maps)
        torch.testing.assert_close(attention.calls[0].maps(slice(1, 2)), maps[1:2])


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, _ = made("vit_tiny_patch16_224")
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(AssertionError, match="height"), capture(model):
        model(torch.randn(1, 3, 32, 32))
    assert kinds == [type(m) for m in model.modules()]


def test_models_without_attention_get_a_sentence() -> None:
    with pytest.raises(UserError, match="ResNet has no attention to look at: no softmax over keys"):
        attention_entropy(timm.create_model("test_resnet"), torch.randn(1, 3, 160, 160))
    channels = timm.create_model("davit_tiny", depths=(1,), attn_types=("channel",), embed_dims=(24,), num_heads=(1,))
    with pytest.raises(UserError, match="relate channels, not tokens"):
        attention_entropy(channels, torch.randn(1, 3, 64, 64))


def construct(sharpness: float) -> nn.Module:
    """A ViT whose queries and keys are its class token's or patches' own directions: rows uniform, or one-hot."""
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=48, num_heads=3).eval()
    attention = model.blocks[0].attn
    with torch.no_grad():
        attention.qkv.weight.zero_()
        attention.qkv.bias.zero_()
        model.pos_embed.zero_()
        model.cls_token.zero_()
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.zero_()
        if sharpness:
            eye = torch.eye(48) * sharpness
            attention.qkv.weight[:96] = torch.cat([eye, eye])
            directions = torch.zeros(17, 48)
            for token in range(16):  # a direction of its own for each token, the same in every head
                directions[token, token::16] = 1
            model.pos_embed[0] = directions
            model.blocks[0].norm1 = nn.Identity()
    return model


def test_uniform_attention_has_the_entropy_of_its_bound() -> None:
    (layer,) = attention_entropy(construct(0), torch.randn(2, 3, 64, 64))
    assert layer.bound == math.log(17)
    torch.testing.assert_close(layer.entropy, torch.full((3,), math.log(17)))


def test_one_hot_attention_has_none() -> None:
    model = construct(100)
    (layer,) = attention_entropy(model, torch.randn(2, 3, 64, 64))
    # All tokens but the last, whose zero query sees all 17 alike, see themselves alone.
    torch.testing.assert_close(layer.entropy, torch.full((3,), math.log(17) / 17))
    heat = attention_map(model, torch.randn(2, 3, 64, 64))
    assert heat.sum() == 0  # the class token sees itself, and no patch


def test_row_entropy_against_a_loop() -> None:
    maps = torch.rand(2, 3, 4, 5, dtype=torch.float64).softmax(dim=-1)
    maps[0, 0, 0] = torch.tensor([1, 0, 0, 0, 0])
    expected = [-sum(float(a) * math.log(a) for a in row if a > 0) for row in maps.flatten(0, 2)]
    torch.testing.assert_close(row_entropy(maps).flatten(), torch.tensor(expected, dtype=torch.float64))


def test_a_map_shows_where_the_class_token_looks() -> None:
    model, images = made("vit_tiny_patch16_224")
    with torch.no_grad(), capture(model) as attentions:
        model(images)
    row = attentions[-1].calls[0].maps().mean(dim=1)[:, 0, 1:].unflatten(1, (4, 4))
    torch.testing.assert_close(attention_map(model, images), row / row.amax(dim=(1, 2), keepdim=True))
    with pytest.raises(UserError, match="layer 2 is out of range: 2 attentions"):
        attention_map(model, images, layer=2)


def test_maps_of_images_that_are_not_square() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=1).eval()
    assert attention_map(model, torch.randn(1, 3, 64, 96)).shape == (1, 4, 6)


def test_windows_are_no_map_of_the_image() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=112, depths=(1,), num_heads=(2,), embed_dim=16)
    with pytest.raises(UserError, match="sees the whole image at once"):
        attention_map(model, torch.randn(1, 3, 112, 112))
    assert model.training
