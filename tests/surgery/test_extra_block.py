"""`+extra_block`: nothing changes at first, and then x + f(LN(x)) comes after the last block, wherever that is."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.surgery.extra_block import ExtraAttention, ExtraMlp
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply

SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2, 1), "num_heads": (2, 4, 8)}
SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


def hugging_face(model: str, config: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def hugging_face_swin() -> nn.Module:
    options = {"image_size": 64, "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 4, 8], "window_size": 4}
    return hugging_face("SwinForImageClassification", "SwinConfig", **options)


def bert() -> nn.Module:
    return hugging_face("BertModel", "BertConfig", vocab_size=99, add_pooling_layer=False, **SMALL)


# The last block of each, and its width and heads.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, int, int]] = {
    "vit": (lambda: timm.create_model("test_vit", img_size=64, num_classes=5), "blocks.5", 64, 2),
    "cait": (lambda: timm.create_model("cait_xxs24_224", img_size=64, depth=2, num_classes=5), "blocks.1", 192, 4),
    "swin": (lambda: SwinTransformer(num_classes=5, **SWIN), "layers.2.blocks.0", 64, 8),
    "edgenext": (lambda: timm.create_model("edgenext_xx_small", num_classes=5), "stages.3.blocks.1", 168, 4),
    "mixer": (lambda: timm.create_model("mixer_s32_224", num_classes=5), "blocks.7", 512, 8),
    "torchvision_vit": (lambda: TorchvisionViT(64, 16, 2, 4, 48, 96), "encoder.layers.encoder_layer_1", 48, 4),
    "hugging_face_swin": (hugging_face_swin, "swin.encoder.layers.2.blocks.0", 64, 8),
}


def stirred(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    side = 224 if name == "mixer" else 64
    return stirred(MODELS[name][0]()).eval(), torch.randn(2, 3, side, side)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output if isinstance(output, Tensor) else output[0]


def test_test_vit_has_six_blocks() -> None:
    blocks: Any = timm.create_model("test_vit").blocks
    assert len(blocks) == 6


@pytest.mark.parametrize("kind", ["msa", "mlp"])
@pytest.mark.parametrize("name", MODELS)
def test_starts_equal_and_takes_the_original_weights(name: str, kind: str) -> None:
    model, x = made(name)
    _, where, dim, heads = MODELS[name]
    before, weights = run(model, x), copy.deepcopy(model.state_dict())
    report = apply(model, "extra_block", kind=kind)
    assert [change.where for change in report.changes] == [where]
    assert report.new_parameters == 4 * dim**2 + (6 if kind == "msa" else 5) * dim
    extra: Any = model.get_submodule(f"{where}.extra")
    if kind == "msa":
        assert extra.attn.num_heads == heads
    assert run(model, x).equal(before)

    stirred(extra)
    moved = run(model, x)
    assert (moved - before).abs().max() > 1e-3 * before.abs().max()
    model.load_state_dict(weights, strict=True)
    assert run(model, x).equal(moved)
    strip(model)
    assert list(model.state_dict()) == list(weights)
    assert run(model, x).equal(before)


def test_what_it_adds() -> None:
    """The same in every layout, for MLP and MSA both treat a map as a set of tokens."""
    torch.manual_seed(0)
    tokens = torch.randn(2, 12, 16, dtype=torch.float64)
    for make in (lambda layout: ExtraAttention(16, 4, layout=layout), lambda layout: ExtraMlp(16, layout=layout)):
        extra: Any = stirred(make("NLC")).double()
        normed = extra.norm(tokens)
        expected = tokens + (extra.mlp(normed) if hasattr(extra, "mlp") else extra.attn(normed))
        torch.testing.assert_close(extra(tokens), expected)
        for layout in ("NHWC", "NCHW"):
            other = make(layout).double()
            other.load_state_dict(extra.state_dict())
            grid = tokens.unflatten(1, (3, 4))
            given = grid.permute(0, 3, 1, 2) if layout == "NCHW" else grid
            output = other(given)
            output = output.permute(0, 2, 3, 1) if layout == "NCHW" else output
            torch.testing.assert_close(output.flatten(1, 2), expected)


def test_it_comes_after_the_last_block() -> None:
    model, x = made("vit")
    apply(model, "extra_block")
    stirred(model.get_submodule("blocks.5.extra"))
    vit: Any = model
    with torch.no_grad():
        tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(x)))
        for block in vit.blocks[:-1]:
            tokens = block(tokens)
        last = vit.blocks[-1]
        tokens = tokens + last.ls1(last.attn(last.norm1(tokens)))
        tokens = tokens + last.ls2(last.mlp(last.norm2(tokens)))
        tokens = tokens + last.extra.attn(last.extra.norm(tokens))
        torch.testing.assert_close(vit.forward_head(vit.norm(tokens)), run(model, x))


def test_padding_stays_unseen() -> None:
    torch.manual_seed(0)
    model = stirred(bert()).eval()
    assert str(report := apply(model, "extra_block")).startswith("+extra_block: 1 change, ")
    assert report.changes[0].where == "encoder.layer.1"
    stirred(model.get_submodule("encoder.layer.1.extra"))
    ids, mask = torch.randint(0, 99, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[:, 8:] = 0
    changed = ids.clone()
    changed[:, 8:] = (ids[:, 8:] + 1) % 99
    with torch.no_grad():
        one, other, short = (model(input_ids=i, attention_mask=mask)[0] for i in (ids, changed, ids))
        short = model(input_ids=ids[:, :8])[0]
    torch.testing.assert_close(one[:, :8], other[:, :8])
    torch.testing.assert_close(one[:, :8], short)


@pytest.mark.parametrize("spec", ["cb+refiner+extra_block", "extra_block+cb+refiner", "extra_block(kind=mlp)+cb"])
def test_composes(spec: str) -> None:
    for name in ("vit", "swin"):
        model, x = made(name)
        before = run(model, x)
        report = apply(model, spec)
        inside = [change.where for change in report.changes if ".extra." in change.where]
        # A later modification takes the extra block for what it is: an attention, or an MLP.
        assert bool(inside) == spec.startswith("extra_block")
        plain, _ = made(name)
        apply(plain, "cb")
        torch.testing.assert_close(run(model, x), run(plain, x), rtol=1e-4, atol=1e-5)
        stirred(model)
        model(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        strip(model)
        model.load_state_dict(made(name)[0].state_dict(), strict=True)
        assert run(model, x).equal(before)


@pytest.mark.parametrize("name", ["vit", "hugging_face_swin", "edgenext"])
def test_copies_pickles_compiles_and_exports(name: str) -> None:
    model, x = made(name)
    apply(model, "extra_block")
    stirred(model.get_submodule(f"{MODELS[name][1]}.extra"))
    expected = run(model, x)
    assert run(copy.deepcopy(model), x).equal(expected)
    assert run(pickle.loads(pickle.dumps(model)), x).equal(expected)
    torch._dynamo.reset()
    tolerance = {"rtol": 1e-4, "atol": 1e-5 * expected.abs().max().item()}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, x), expected, **tolerance)
    torch.testing.assert_close(run(torch.export.export(model, (x,)).module(), x), expected, **tolerance)


@pytest.mark.parametrize(
    ("base", "spec", "reason"),
    [
        ("test_vit", "extra_block+extra_block(kind=mlp)", "cannot be changed like this twice"),
        ("tnt_s_legacy_patch16_224", "extra_block", "the last block of TNT, blocks.11, gives more than one map"),
        ("vgg11", "extra_block", "has no residual block after which another could come"),
        ("test_vit", "extra_block(kind=conv)", "kind takes msa or mlp"),
    ],
)
def test_reasons(refused: Callable[[str, str, str], None], base: str, spec: str, reason: str) -> None:
    refused(base, spec, reason)
