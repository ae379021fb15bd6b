"""`+less_attention`: zero reaches the residual sum, weights and work go, and LIT's Table 5 comes out."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.models.swin_transformer import SwinTransformer as TorchvisionSwin

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.models.cost import measure
from vitrefine.surgery.flow import SUMS
from vitrefine.surgery.graft import Hollow, strip
from vitrefine.surgery.operate import apply

SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2, 1), "num_heads": (2, 4, 8)}
PVT: dict[str, Any] = {
    "img_size": 64,
    "embed_dims": (8, 12, 16, 24),
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 2, 4, 4),
    "mlp_ratios": (2, 2, 2, 2),
}


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"image_size": 64, "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 4, 8], "window_size": 4}
    model = getattr(transformers, f"{name}ForImageClassification")
    return model(getattr(transformers, f"{name}Config")(**options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swin": lambda: SwinTransformer(num_classes=5, **SWIN),
    "swin_v2": lambda: SwinTransformerV2(num_classes=5, **SWIN),
    "swin_v2_cr": lambda: timm.create_model("swinv2_cr_tiny_ns_224", num_classes=5, **SWIN),
    "torchvision_swin": lambda: TorchvisionSwin([4, 4], 16, [1, 2, 1], [2, 4, 8], [4, 4], num_classes=5),
    "hugging_face_swin": lambda: hugging_face("Swin"),
    "hugging_face_swin_v2": lambda: hugging_face("Swinv2"),
    "pvt": lambda: timm.create_model("pvt_small_msa", num_classes=5, **PVT),
    "pvt_v2": lambda: PyramidVisionTransformerV2(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_classes=5),
    "levit": lambda: timm.create_model("levit_128s", depth=(1, 1, 1), img_size=64, num_classes=5),
    "maxvit": lambda: timm.create_model("maxvit_pico_rw_256", img_size=64, depths=(1, 1, 1, 1), num_classes=5),
}


def stirred(model: nn.Module) -> nn.Module:
    """Norms, biases and heads that start at one or zero would hide mistakes: LN(0) is a bias that starts at zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return stirred(MODELS[name]()).eval(), torch.randn(2, 3, 64, 64)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output if isinstance(output, Tensor) else output[0]


class ZeroSums(TorchFunctionMode):
    """Counts sums of maps of which one is all zeros."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in SUMS
            and all(isinstance(a, Tensor) and a.ndim > 2 for a in args[:2])
            and args[0].shape == args[1].shape
        ):
            self.count += any(bool(a.eq(0).all()) for a in args[:2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_zero_reaches_every_sum_and_the_weights_go(name: str) -> None:
    model, x = made(name)
    before, weights = run(model, x), copy.deepcopy(model.state_dict())
    report = apply(model, "less_attention")
    with ZeroSums() as zeros:
        after = run(model, x)
    assert zeros.count == len(report.changes) > 1
    assert after.shape == before.shape
    assert (after - before).abs().max() > 1e-3 * before.abs().max()

    gone = sum(value.numel() for n, value in weights.items() if n not in model.state_dict())
    assert gone >= -report.new_parameters > 0
    assert all(not list(model.get_submodule(change.where).parameters()) for change in report.changes)
    model.load_state_dict({n: v + 1 if v.is_floating_point() else v for n, v in weights.items()}, strict=True)
    assert all(v.equal(weights[n] + 1) for n, v in model.state_dict().items() if v.is_floating_point())

    assert strip(model) is model
    assert list(model.state_dict()) == list(weights)
    model.load_state_dict(weights)
    assert run(model, x).equal(before)


def test_a_block_of_any_style_is_left_with_its_mlp() -> None:
    x = torch.randn(2, 16, 16, 16)
    for name, where in (("swin", "layers.0.blocks.0"), ("torchvision_swin", "features.1.0")):
        model, _ = made(name)
        apply(model, "less_attention")
        block: Any = model.get_submodule(where)
        torch.testing.assert_close(block(x), x + block.mlp(block.norm2(x)))
        assert not list(block.norm1.parameters())
    model, _ = made("swin_v2")  # norms come after attention and MLP
    apply(model, "less_attention")
    block = model.get_submodule("layers.0.blocks.0")
    assert block.norm2.bias.abs().max() > 0
    torch.testing.assert_close(block(x), x + block.norm2(block.mlp(x)))
    for name, after in (("swin", False), ("swin_v2", True)):
        model, _ = made(f"hugging_face_{name}")
        apply(model, "less_attention")
        base: Any = model.base_model  # type: ignore[union-attr]
        block = base.encoder.layers[0].blocks[0]
        tokens = x.flatten(1, 2)
        (output, *_) = block(tokens, (16, 16))
        mlp = block.mlp if hasattr(block, "mlp") else lambda t, b=block: b.output(b.intermediate(t))
        norm = block.layernorm_after
        torch.testing.assert_close(output, tokens + (norm(mlp(tokens)) if after else mlp(norm(tokens))))


def test_equals_a_model_that_was_built_so() -> None:
    model, x = made("pvt")
    built = timm.create_model("pvt_small_msa", num_classes=5, attention=(0, 0, 1, 1), **PVT).eval()
    apply(model, "less_attention")
    assert list(model.state_dict()) == list(built.state_dict())
    built.load_state_dict(model.state_dict(), strict=True)
    assert run(model, x).equal(run(built, x))


@pytest.mark.parametrize(
    ("stages", "parameters", "macs"),
    # LIT, Table 5: 20M and 8.4G, 20M and 4.5G (4.446: the printed figure counts norms), 19M and 3.6G, 17M and 3.0G,
    # 14M and 2.8G. The last with the mean for the class token, which stays though nothing reads it: 1024 parameters.
    [
        ("none", 20_185_384, 8.376),
        ("1", 20_135_080, 4.446),
        ("1-2", 19_869_864, 3.611),
        ("1-3", 17_400_744, 2.982),
        ("1-4", 14_244_776 + 1024, 2.817),
    ],
)
def test_table_5_of_lit(stages: str, parameters: int, macs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model("pvt_small_msa", global_pool="avg" if stages == "1-4" else "token")
    if stages != "none":
        apply(model, f"less_attention(stages={stages})")
    cost = measure(model, (224, 224))
    assert (cost.params, round(cost.macs / 1e9, 3)) == (parameters, macs)


def test_stages() -> None:
    model, _ = made("pvt")
    report = apply(model, "less_attention(stages=[2,3])")
    assert [change.where for change in report.changes] == [
        f"stages.{b}.attn" for b in ("1.blocks.0", "2.blocks.0", "2.blocks.1")
    ]
    assert "stage 2 with its norm1" in report.changes[0].what
    assert isinstance(model.get_submodule("stages.2.blocks.0.norm1"), Hollow)


def test_attention_that_merges_or_is_the_class_tokens_stays() -> None:
    for name, kept in (
        ("levit_128s", "stages.1.downsample"),
        ("volo_d1_224", "post_network"),
        ("hiera_tiny_224", "blocks.1."),
    ):
        with torch.device("meta"):
            model = timm.create_model(name)
        before = [n for n in model.state_dict() if n.startswith(kept)]
        assert before
        apply(model, "less_attention")
        assert [n for n in model.state_dict() if n.startswith(kept)] == before


@pytest.mark.parametrize(
    "spec", ["cb+refiner+less_attention", "less_attention+cb+refiner", "less_attention+extra_block"]
)
def test_composes(spec: str) -> None:
    for name in ("swin", "pvt"):
        model, x = made(name)
        before = run(model, x)
        apply(model, spec)
        stirred(model)
        model.train()
        model(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        model.eval()
        strip(model)
        assert len(model.state_dict()) == len(made(name)[0].state_dict())
        model.load_state_dict(made(name)[0].state_dict())
        assert run(model, x).equal(before)


def test_parts_taken_out_follow_the_model() -> None:
    model, x = made("swin")
    before = run(model, x)
    apply(model, "less_attention")
    model.double().train()
    strip(model)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(run(model.eval(), x.double()).float(), before)


@pytest.mark.parametrize("name", ["swin_v2", "hugging_face_swin", "pvt"])
def test_copies_pickles_compiles_and_exports(name: str) -> None:
    model, x = made(name)
    apply(model, "less_attention")
    expected = run(model, x)
    assert run(copy.deepcopy(model), x).equal(expected)
    assert run(pickle.loads(pickle.dumps(model)), x).equal(expected)
    torch._dynamo.reset()
    torch.testing.assert_close(run(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected)
    torch.testing.assert_close(run(torch.export.export(model, (x,)).module(), x), expected)


@pytest.mark.parametrize(
    ("base", "spec", "reason"),
    [
        ("vit_tiny_patch16_224", "less_attention", "is no pyramid: it works on its tokens at one resolution"),
        ("resnet18", "less_attention", "has no attention to take out: no softmax over keys"),
        ("coatnet_nano_rw_224", "less_attention", "stages 1, 2: it attends only in stages 3, 4 of 4"),
        ("pvt_v2_b0", "less_attention(stages=3-5)", "out of range: the model has 4 stages"),
        ("pvt_v2_b0", "less_attention+less_attention", "it attends only in stages 3, 4 of 4"),
        ("pvt_small_msa", "less_attention(stages=1-4)", "the class token .* create the model with global_pool=avg"),
        ("mvitv2_tiny", "less_attention", "MultiScaleAttention in stage 1 of MultiScaleVit cannot go: it gives more"),
        ("efficientvim_m1", "less_attention", "not simply added"),
    ],
)
def test_reasons(refused: Callable[[str, str, str], None], base: str, spec: str, reason: str) -> None:
    refused(base, spec, reason)
