"""Broadcasting in models that exist: the right place, the right layout, nothing counted twice."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from transformers import BertConfig, BertModel, CLIPVisionConfig, CLIPVisionModel

from vitrefine.errors import UserError
from vitrefine.layers.context_broadcast import GatedContextBroadcast, create_broadcast
from vitrefine.surgery.operate import apply

TINY = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}


def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=5).double().eval()


def tokens(dim: int = 192) -> Tensor:
    return torch.randn(2, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def cb(x: Tensor) -> Tensor:
    return (x + x.mean(dim=1, keepdim=True)) / 2


def test_end() -> None:
    plain, changed = vit(), vit()
    apply(changed, "cb(layers=0)")
    torch.testing.assert_close(changed.blocks[0].mlp(tokens()), cb(plain.blocks[0].mlp(tokens())))
    torch.testing.assert_close(changed.blocks[1].mlp(tokens()), plain.blocks[1].mlp(tokens()))


def test_front() -> None:
    plain, changed = vit(), vit()
    apply(changed, "cb(layers=0,position=front)")
    torch.testing.assert_close(changed.blocks[0].mlp(tokens()), plain.blocks[0].mlp(cb(tokens())))


def test_mid_is_end_where_nothing_but_a_linear_layer_lies_between() -> None:
    mid, end = vit(), vit()
    apply(mid, "cb(position=mid)")
    apply(end, "cb(position=end)")
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(mid(image), end(image))


@pytest.mark.parametrize("position", ["front", "end"])
def test_attention(position: str) -> None:
    plain, changed = vit(), vit()
    apply(changed, f"cb(layers=0,block=attention,position={position})")
    expected = plain.blocks[0].attn(cb(tokens())) if position == "front" else cb(plain.blocks[0].attn(tokens()))
    torch.testing.assert_close(changed.blocks[0].attn(tokens()), expected)
    torch.testing.assert_close(changed.blocks[0].mlp(tokens()), plain.blocks[0].mlp(tokens()))


def test_both() -> None:
    model = vit()
    report = apply(model, "cb_s(block=both)")
    assert report.new_parameters == 2 * 4 * 192
    assert {change.where for change in report.changes} == {
        f"blocks.{i}.{part}" for i in range(4) for part in ("attn", "mlp")
    }


@pytest.mark.parametrize(
    ("name", "arguments", "gated_by_class"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, [True, True]),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1, "reg_tokens": 4}, [True]),  # nine tokens: no 3×3
        ("cait_xxs24_224", {"img_size": 64, "depth": 2}, [False, False]),
        ("xcit_nano_12_p16_224", {"img_size": 64, "depth": 2}, [False, False]),
        ("lit_ti", {"img_size": 64, "depths": (1, 1, 1, 1)}, [False, False, False, True]),
        ("tnt_s_legacy_patch16_224", {"img_size": 64, "depth": 1}, [False, True]),
        ("crossvit_tiny_240", {"depth": ((1, 1, 0),)}, [True, True]),
    ],
)
def test_a_class_token_gates_only_where_there_is_one(
    name: str, arguments: dict[str, Any], gated_by_class: list[bool]
) -> None:
    model = timm.create_model(name, **arguments)
    apply(model, "cb_gate(layers=all)")
    assert [m.class_token for m in model.modules() if isinstance(m, GatedContextBroadcast)] == gated_by_class


def torchvision_vit() -> Any:
    torch.manual_seed(0)
    return VisionTransformer(32, 8, 2, 3, 12, 16, num_classes=5).double().eval()


@pytest.mark.parametrize("kind", ["cb", "cb_s", "cb_gate", "cb_hybrid"])
def test_a_sequence_broadcasts_once(kind: str) -> None:
    """torchvision's MLP is a sequence, which would run a child that is put into it as one more step."""
    plain, changed = torchvision_vit(), torchvision_vit()
    apply(changed, f"{kind}(layers=0)")
    part = create_broadcast(kind, 12)
    for parameter in (*part.parameters(), *(p for n, p in changed.named_parameters() if n.endswith("scale"))):
        nn.init.constant_(parameter, 0.5)
    mlp, expected = changed.encoder.layers[0].mlp, part.double()(plain.encoder.layers[0].mlp(tokens(12)))
    torch.testing.assert_close(mlp(tokens(12)), expected)


def test_a_sequence_broadcasts_at_its_front() -> None:
    plain, changed = torchvision_vit(), torchvision_vit()
    apply(changed, "cb(layers=0,position=front)")
    x = tokens(12)
    torch.testing.assert_close(changed.encoder.layers[0].mlp(x), plain.encoder.layers[0].mlp(cb(x)))


def test_attention_that_is_given_its_tokens_three_times() -> None:
    plain, changed = torchvision_vit(), torchvision_vit()
    apply(changed, "cb(layers=0,block=attention,position=front)")
    x, (ours, theirs) = tokens(12), (model.encoder.layers[0].self_attention for model in (changed, plain))
    torch.testing.assert_close(ours(x, x, x)[0], theirs(cb(x), cb(x), cb(x))[0])


def test_attention_that_is_given_its_tokens_by_name() -> None:
    torch.manual_seed(0)
    model = CLIPVisionModel(CLIPVisionConfig(**TINY, image_size=32, patch_size=8)).double().eval()
    attention = model.get_submodule("encoder.layers.0.self_attn")
    x = tokens(12)
    expected = attention(hidden_states=cb(x))[0]
    apply(model, "cb(layers=0,block=attention,position=front)")
    torch.testing.assert_close(attention(hidden_states=x)[0], expected)


class TokensFirst(nn.Module):
    """As OpenAI's CLIP has it: a model whose blocks work on (tokens, batch, channels)."""

    img_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 2, 2)
        self.attention = nn.MultiheadAttention(12, 3)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).permute(2, 0, 1)
        x = x + self.attention(x, x, x)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("cb(block=attention,layers=all)", "does not work on plain tokens"),
        ("cb(layers=all)", "mean would be one over images"),
        ("cb_gate(layers=all,position=mid)", "mean would be one over images"),
        ("se(reduction=2)", "mean would be one over images"),
        ("extra_block", "attention would be across images"),
        ("uniform_head(mode=append)", "use mode=replace"),
    ],
)
def test_tokens_before_the_batch_are_refused_where_images_would_mix(spec: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        apply(TokensFirst(), spec)


@pytest.mark.parametrize("spec", ["refiner", "uniform_head", "extra_block(kind=mlp)"])
@torch.no_grad()
def test_tokens_before_the_batch_stay_with_their_images(spec: str) -> None:
    model = TokensFirst().double().eval()
    apply(model, spec)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[:, :1], model(images[:1]))


def test_a_place_without_weights_takes_type_and_device_from_its_neighbours() -> None:
    model = BertModel(BertConfig(**TINY, vocab_size=20)).to(torch.bfloat16)
    apply(model, "cb_s")
    scale = model.get_parameter("encoder.layer.0.output.dropout.broadcast.scale")
    assert scale.dtype == torch.bfloat16
    with torch.device("meta"):
        shadow = BertModel(BertConfig(**TINY, vocab_size=20))
    apply(shadow, "cb_s")
    assert all(parameter.is_meta for parameter in shadow.parameters())


def test_an_mlp_that_is_given_a_few_tokens_at_a_time_is_refused() -> None:
    model = BertModel(BertConfig(**TINY, vocab_size=20, chunk_size_feed_forward=4))
    with pytest.raises(UserError, match="chunk_size_feed_forward to 0"):
        apply(model, "cb")


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("resnet18", "cb", "convolution or pooling only"),
        ("vit_tiny_patch16_224", "cb(block=attention,position=mid)", "position=mid is a place in the MLP"),
        ("vit_tiny_patch16_224", "cb+cb_s", "^Mlp cannot be changed like this twice: broadcast was put there before"),
        ("mixer_s32_224", "cb(block=attention)", "has no attention"),
    ],
)
def test_reasons(name: str, spec: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        apply(timm.create_model(name, device="meta"), spec)


def test_parameters_that_the_paper_prints() -> None:
    """CB adds none; CB_S 0.02 % to ViT-S."""
    model = timm.create_model("vit_small_patch16_224", device="meta")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert apply(model, "cb(position=front)").new_parameters == 0
    added = apply(model, "cb_s").new_parameters
    assert added == 12 * 384
    assert f"{added / total:.2%}" == "0.02%"
