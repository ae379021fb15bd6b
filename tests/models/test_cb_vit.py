"""ViTs with Context Broadcasting: what timm's ViT can do, they can; sizes and weights are those of DeiT."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from vitrefine.errors import UserError
from vitrefine.layers.context_broadcast import ContextBroadcastMlp
from vitrefine.models.cb_vit import ContextBroadcastVisionTransformer

NAMES = [f"{kind}_{size}" for kind in ("cb_vit", "cb_s_vit") for size in ("ti", "s", "b")]
BASES = {"ti": "deit_tiny_patch16_224", "s": "deit_small_patch16_224", "b": "deit_base_patch16_224"}
TINY = ["cb_vit_ti", "cb_s_vit_ti"]


def small(name: str = "cb_vit_ti", **options: Any) -> ContextBroadcastVisionTransformer:
    torch.manual_seed(0)
    model = timm.create_model(name, **{"img_size": 64, "depth": 4, "num_classes": 10, **options})
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("scale"):
            nn.init.normal_(parameter)
    return model.eval()


def images(height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def broadcasting_blocks(model: ContextBroadcastVisionTransformer) -> list[int]:
    return [index for index, block in enumerate(model.blocks) if isinstance(block.mlp, ContextBroadcastMlp)]


@pytest.mark.parametrize("name", NAMES)
def test_size_is_that_of_deit(name: str) -> None:
    model = timm.create_model(name, device="meta")
    base: Any = timm.create_model(BASES[name.rsplit("_", 1)[1]], device="meta")
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    assert extra == (12 * base.embed_dim if name.startswith("cb_s_") else 0)
    assert broadcasting_blocks(model) == (list(range(12)) if name.startswith("cb_s_") else list(range(6, 12)))


def test_scales_are_two_hundredths_of_a_percent_of_vit_s() -> None:
    model = timm.create_model("cb_s_vit_s", device="meta")
    scales = sum(p.numel() for n, p in model.named_parameters() if n.endswith("scale"))
    assert round(100 * scales / sum(p.numel() for p in model.parameters()), 2) == 0.02


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [(4, "upper", [2, 3]), (5, "upper", [2, 3, 4]), (1, "upper", [0]), (4, "all", [0, 1, 2, 3])],
)
def test_layers(depth: int, layers: str, expected: list[int]) -> None:
    assert broadcasting_blocks(small(depth=depth, layers=layers)) == expected


def test_deit_loads_strictly_and_cb_changes_its_output() -> None:
    base = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=4, num_classes=10).eval()
    model = small()
    model.load_state_dict(base.state_dict(), strict=True)
    with torch.no_grad():
        assert not torch.allclose(model(images()), base(images()), atol=1e-3)


def test_deit_loads_into_cb_s_and_the_model_starts_as_it() -> None:
    torch.manual_seed(0)
    base = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=4, num_classes=10).eval()
    model = timm.create_model("cb_s_vit_ti", img_size=64, depth=4, num_classes=10).eval()
    keys = model.load_state_dict(base.state_dict(), strict=False)
    assert keys.missing_keys == [f"blocks.{index}.mlp.broadcast.scale" for index in range(4)]
    assert not keys.unexpected_keys
    with torch.no_grad():
        assert torch.equal(model(images()), base(images()))


def test_blocks_compute_equation_1() -> None:
    model = small().double()
    block = model.blocks[3]
    x = torch.randn(2, 17, 192, dtype=torch.float64)
    after_attention = x + block.attn(block.norm1(x))
    mlp = block.mlp
    branch = mlp.fc2(mlp.act(mlp.fc1(block.norm2(after_attention))))
    expected = after_attention + 0.5 * branch + 0.5 * branch.mean(dim=1, keepdim=True)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("broadcast", ["cb_gate", "cb_hybrid"])
def test_other_broadcasts(broadcast: str) -> None:
    model = small(broadcast=broadcast)
    assert model.blocks[3].mlp.broadcast.class_token
    assert model(images()).shape == (2, 10)
    pooled = small(broadcast=broadcast, class_token=False, global_pool="avg")
    assert not pooled.blocks[3].mlp.broadcast.class_token


@pytest.mark.parametrize("name", TINY)
def test_backward_reaches_every_parameter(name: str) -> None:
    model = small(name).train()
    model(images()).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("height", "width"), [(32, 96), (80, 48), (50, 71)])
def test_any_input_size(name: str, height: int, width: int) -> None:
    model = small(name)
    with torch.no_grad():
        assert model(images(height, width)).shape == (2, 10)
        features = model.forward_intermediates(images(height, width), indices=[3], intermediates_only=True)[0]
    assert features.shape == (2, 192, -(-height // 16), -(-width // 16))


@pytest.mark.parametrize("name", TINY)
def test_state_dict_round_trip(name: str, tmp_path: Path) -> None:
    model = small(name)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = timm.create_model(
        name, img_size=64, depth=4, num_classes=10, checkpoint_path=str(tmp_path / "model.pt")
    ).eval()
    with torch.no_grad():
        assert torch.equal(other(images()), model(images()))


@pytest.mark.parametrize("name", TINY)
def test_compile_equals_eager(name: str) -> None:
    model = small(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), model(images()))
        torch.testing.assert_close(compiled(images(32, 96)), model(images(32, 96)))


@pytest.mark.parametrize("name", TINY)
def test_export(name: str) -> None:
    model = small(name)
    with torch.no_grad():
        exported = torch.export.export(model, (images(),)).module()
        torch.testing.assert_close(exported(images()), model(images()))


def test_features_only() -> None:
    features: Any = timm.create_model("cb_vit_ti", img_size=64, depth=4, features_only=True, out_indices=(1, 3)).eval()
    with torch.no_grad():
        outputs = features(images(64, 96))
    assert [tuple(output.shape) for output in outputs] == [(2, 192, 4, 6)] * 2
    assert features.feature_info.channels() == [192, 192]
    assert features.feature_info.reduction() == [16, 16]


def test_intermediates_are_features() -> None:
    model = small()
    with torch.no_grad():
        final, (last,) = model.forward_intermediates(images(), indices=[3], norm=True, output_fmt="NLC")
        torch.testing.assert_close(final, model.forward_features(images()))
        torch.testing.assert_close(last, final[:, 1:])


def test_classifier_and_pooling_can_be_reset() -> None:
    model = small()
    model.reset_classifier(7)
    assert model(images()).shape == (2, 7)
    model.reset_classifier(0, "avg")
    assert model(images()).shape == (2, 192)


def test_optimiser_groups() -> None:
    model = small("cb_s_vit_ti")
    decayed = {id(p) for p in param_groups_weight_decay(model, 0.05, model.no_weight_decay())[1]["params"]}
    assert not [n for n, p in model.named_parameters() if n.endswith("scale") and id(p) in decayed]
    layers = param_groups_layer_decay(model, layer_decay=0.5)
    assert len({group["lr_scale"] for group in layers}) == 4 + 2


@pytest.mark.parametrize("name", TINY)
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    gradients = []
    for enable in (False, True):
        model = small(name).train()
        model.set_grad_checkpointing(enable)
        model(images()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_data_configuration_is_that_of_deit() -> None:
    names = ("cb_vit_s", "deit_small_patch16_224")
    configs = [timm.data.resolve_model_data_config(timm.create_model(name, device="meta")) for name in names]
    assert configs[0] == configs[1]


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match="layers 'lower'"):
        small(layers="lower")
    with pytest.raises(UserError, match="broadcast 'cbs'"):
        small(broadcast="cbs")
