"""`+dtm`: nothing changes until offsets are learned, then taps are read where they point; and LIT-Ti, derived."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.nest import Nest
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torchvision.models.swin_transformer import PatchMerging
from torchvision.models.swin_transformer import SwinTransformer as TorchvisionSwin
from torchvision.ops import deform_conv2d

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.layers.token_merging import DeformableTokenMerging, OffsetConvolution, offset_param_groups
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply

SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2, 1), "num_heads": (2, 4, 8)}
PVT: dict[str, Any] = {
    "img_size": 64,
    "embed_dims": (8, 12, 16, 24),
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 2, 4, 4),
    "mlp_ratios": (2, 2, 2, 2),
}
MAXVIT: dict[str, Any] = {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1), "stem_width": 16}


def hugging_face_swin() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"image_size": 64, "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 4, 8], "window_size": 4}
    return transformers.SwinForImageClassification(transformers.SwinConfig(**options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swin": lambda: SwinTransformer(num_classes=5, **SWIN),
    "swin_v2": lambda: SwinTransformerV2(num_classes=5, **SWIN),
    "torchvision_swin": lambda: TorchvisionSwin([4, 4], 16, [1, 2, 1], [2, 4, 8], [4, 4], num_classes=5),
    "hugging_face_swin": hugging_face_swin,
    "pvt": lambda: timm.create_model("pvt_small_msa", num_classes=5, **PVT),
    "pvt_v2": lambda: PyramidVisionTransformerV2(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_classes=5),
    "pit": lambda: timm.create_model("pit_ti_224", img_size=64, depth=(1, 1, 1), num_classes=5),
    "nest": lambda: Nest(64, embed_dims=(16, 24, 32), num_heads=(2, 4, 8), depths=(1, 1, 1), num_classes=5),
    "maxvit": lambda: timm.create_model("maxvit_pico_rw_256", num_classes=5, **MAXVIT),
}


# On a CPU, depth-wise convolutions take forever in double precision.
SINGLE = ("pvt_v2", "pit", "maxvit")


def stirred(model: nn.Module, amount: float = 0.1) -> nn.Module:
    """Norms, biases and heads that start at one or zero would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return model


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    dtype = torch.float32 if name in SINGLE else torch.float64
    return stirred(MODELS[name]()).eval().to(dtype), torch.randn(2, 3, 64, 64, dtype=dtype)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output if isinstance(output, Tensor) else output[0]


def close(one: Tensor, other: Tensor, tolerance: float = 0.0) -> bool:
    tolerance = tolerance or (1e-5 if other.dtype == torch.float32 else 1e-10)
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_retrofit_starts_equal_and_takes_the_original_weights(name: str) -> None:
    model, x = made(name)
    before, weights = run(model, x), copy.deepcopy(model.state_dict())
    report = apply(model, "dtm")
    assert len(report.changes) == (3 if name in ("pvt", "pvt_v2", "maxvit") else 2)
    assert close(run(model, x), before)
    new = {n: p for n, p in model.named_parameters() if n not in weights}
    assert report.new_parameters == sum(p.numel() for p in new.values())
    assert {n.rsplit(".", 2)[1] for n in new} == {"offset"}
    assert all(p.eq(0).all() and p.dtype == before.dtype for p in new.values())

    stirred(model)
    assert not close(run(model, x), before, 1e-3)
    offsets = {n: p.clone() for n, p in new.items()}
    model.load_state_dict(weights, strict=True)
    assert all(p.equal(offsets[n]) for n, p in new.items())
    assert all(value.equal(weights[n]) for n, value in model.state_dict().items() if n in weights)

    assert strip(model) is model
    assert list(model.state_dict()) == list(weights)
    assert run(model, x).equal(before)


@pytest.mark.parametrize("name", ["swin", "hugging_face_swin", "pvt_v2", "nest", "maxvit"])
def test_gradients_reach_every_offset_at_once(name: str) -> None:
    model, x = made(name)
    apply(model, "dtm")
    output = model(x)
    (output if isinstance(output, Tensor) else output[0]).square().sum().backward()
    offsets = [p for m in model.modules() if isinstance(m, OffsetConvolution) for p in m.parameters()]
    assert offsets
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in offsets)


def test_a_convolution_becomes_torchvisions_deformable_one() -> None:
    for name, where in (("pvt_v2", "stages.1.downsample.proj"), ("pit", "transformers.1.pool.conv")):
        model, _ = made(name)
        apply(model.double(), "dtm")
        conv: Any = stirred(model.get_submodule(where), 0.3)
        x = torch.randn(2, conv.in_channels, 9, 13, dtype=torch.float64)
        geometry = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
        offset = F.conv2d(x, conv.offset.weight, conv.offset.bias, **geometry)
        assert conv.sampling_offsets(x).equal(offset)
        expected = deform_conv2d(x, offset, conv.weight, conv.bias, **geometry)
        torch.testing.assert_close(conv(x), expected)
        assert conv(x).is_contiguous()


def read_again(x: Tensor, offset: Tensor) -> Tensor:
    """An NHWC map of even sides, each 2×2 window at its offsets, by way of torchvision's operator."""
    channels = x.shape[-1]
    taps = []
    for tap in range(4):
        weight = torch.zeros(channels, 1, 2, 2, dtype=x.dtype)
        weight[:, :, tap // 2, tap % 2] = 1
        taps.append(deform_conv2d(x.permute(0, 3, 1, 2), offset, weight, stride=2))
    return F.pixel_shuffle(torch.stack(taps, 2).flatten(1, 2), 2).permute(0, 2, 3, 1)


def test_swins_merging_is_handed_a_map_that_was_read_again() -> None:
    """NHWC in timm and torchvision, tokens in Hugging Face, where the grid comes beside them: here it is not square."""
    places = {
        "swin": "layers.1.downsample",
        "torchvision_swin": "features.2",
        "hugging_face_swin": "swin.encoder.layers.0.downsample",
    }
    for name, where in places.items():
        model, _ = made(name)
        original: Any = copy.deepcopy(model.get_submodule(where))
        apply(model, "dtm")
        merging: Any = stirred(model.get_submodule(where), 0.3)
        original.load_state_dict(merging.state_dict(), strict=False)
        x = torch.randn(2, 6, 10, 16, dtype=torch.float64)
        offset = F.conv2d(x.permute(0, 3, 1, 2), merging.offset.weight, merging.offset.bias, stride=2)
        assert offset.abs().max() > 0.5
        moved = read_again(x, offset)
        if name == "hugging_face_swin":
            torch.testing.assert_close(merging(x.flatten(1, 2), (6, 10)), original(moved.flatten(1, 2), (6, 10)))
        else:
            torch.testing.assert_close(merging(x), original(moved))


def test_odd_maps_keep_their_size() -> None:
    model, _ = made("torchvision_swin")
    original: Any = copy.deepcopy(model.get_submodule("features.2"))
    assert isinstance(original, PatchMerging)
    apply(model, "dtm")
    merging: Any = model.get_submodule("features.2")
    x = torch.randn(2, 7, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(merging(x), original(x))
    assert merging.sampling_offsets(x).shape == (2, 8, 4, 3)


def test_stages_choose_the_merges() -> None:
    model, _ = made("pvt")
    report = apply(model, "dtm", stages=[2, 4])
    assert [change.where for change in report.changes] == ["stages.1.merge.merge", "stages.3.merge.merge"]


def test_the_learning_rate_of_the_offsets() -> None:
    for name, variant in (("swin", "retrofit"), ("pvt_v2", "retrofit"), ("pvt_v2", "paper")):
        model, _ = made(name)
        apply(model, "dtm", variant=variant)
        offsets = {id(p) for n, p in model.named_parameters() if ".offset." in n}
        usual, slow = offset_param_groups(model)
        assert slow["lr_scale"] == 0.01
        assert {id(p) for p in slow["params"]} == offsets
        assert not offsets & {id(p) for p in usual["params"]}


def test_lit_ti_derived_from_pvt() -> None:
    with torch.device("meta"):
        derived, lit = timm.create_model("pvt_small_msa"), timm.create_model("lit_ti")
        apply(derived, "less_attention(stages=1-2)+dtm(variant=paper)")
    assert sum(p.numel() for p in derived.parameters()) == 19_886_272
    assert {n: v.shape for n, v in derived.state_dict().items()} == {n: v.shape for n, v in lit.state_dict().items()}

    torch.manual_seed(0)
    lit = stirred(timm.create_model("lit_ti", num_classes=5, **PVT)).eval()
    for norm in (m for m in lit.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    derived = timm.create_model("pvt_small_msa", num_classes=5, **PVT).eval()
    apply(derived, "less_attention(stages=1-2)+dtm(variant=paper)")
    derived.load_state_dict(lit.state_dict(), strict=True)
    for size in ((64, 64), (64, 96)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(run(derived, x), run(lit, x))


@pytest.mark.parametrize("name", ["swin", "swin_v2", "torchvision_swin", "hugging_face_swin", "pvt_v2", "pit", "nest"])
def test_paper_variant_takes_the_place_of_the_merging(name: str) -> None:
    model, x = made(name)
    before, weights = run(model, x), copy.deepcopy(model.state_dict())
    report = apply(model, "dtm(variant=paper)")
    placed = [model.get_submodule(change.where) for change in report.changes]
    assert all(isinstance(module, DeformableTokenMerging) for module in placed)
    assert run(model, x).shape == before.shape
    assert not close(run(model, x), before, 1e-3)

    stirred(model)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({n: v + 1 if v.is_floating_point() else v for n, v in weights.items()}, strict=True)
    for change, module in zip(report.changes, placed, strict=True):
        assert all(value.equal(own[f"{change.where}.{n}"]) for n, value in module.state_dict().items())
    kept = [n for n in weights if not n.startswith(tuple(f"{change.where}." for change in report.changes))]
    assert all(model.state_dict()[n].equal(weights[n] + 1) for n in kept if weights[n].is_floating_point())
    model.load_state_dict(own, strict=True)
    assert all(value.equal(own[n]) for n, value in model.state_dict().items())

    strip(model)
    assert list(model.state_dict()) == list(weights)
    model.load_state_dict(weights)
    assert run(model, x).equal(before)


@pytest.mark.parametrize(("before", "after"), [("cb+refiner", "dtm"), ("dtm", "cb+refiner"), ("dtm", "less_attention")])
def test_composes(before: str, after: str) -> None:
    for name in ("swin", "pvt_v2"):
        model, x = made(name)
        original = run(model, x)
        apply(model, before)
        apply(model, after)
        assert sum(isinstance(m, OffsetConvolution) for m in model.modules()) == {"swin": 2, "pvt_v2": 3}[name]
        if "less" not in after:
            plain, _ = made(name)
            apply(plain, "cb")
            assert close(run(model, x), run(plain, x), 1e-5)
        strip(model)
        assert run(model, x).equal(original)


@pytest.mark.parametrize(
    ("name", "spec"), [("pvt_v2", "dtm"), ("hugging_face_swin", "dtm"), ("swin", "dtm(variant=paper)")]
)
def test_copies_pickles_compiles_and_exports(name: str, spec: str) -> None:
    model, x = made(name)
    apply(model, spec)
    stirred(model, 0.05)
    expected = run(model, x)
    assert run(copy.deepcopy(model), x).equal(expected)
    assert run(pickle.loads(pickle.dumps(model)), x).equal(expected)
    torch._dynamo.reset()
    assert close(run(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected)
    assert close(run(torch.export.export(model, (x,)).module(), x), expected)


def test_new_weights_are_where_the_model_is() -> None:
    """A pool has no weights of its own to go by."""
    with torch.device("meta"):
        model = timm.create_model("nextvit_small").to(torch.bfloat16)
    report = apply(model, "dtm")
    assert report.changes[0].where == "stages.1.blocks.0.patch_embed.pool"
    offsets = [p for n, p in model.named_parameters() if ".offset." in n]
    assert len(offsets) == 6
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in offsets)


@pytest.mark.parametrize(
    ("base", "spec", "reason"),
    [
        ("vit_tiny_patch16_224", "dtm", "is no pyramid: it works on its tokens at one resolution"),
        ("lit_ti", "dtm", "merges deformably already, at stages.1.merge"),
        ("pvt_v2_b0", "dtm+dtm", "merges deformably already, at stages.1.downsample.proj"),
        ("swin_tiny_patch4_window7_224", "dtm(variant=paper)+dtm", "merges deformably already, at layers.1.downsample"),
        ("pvt_v2_b0", "dtm(stages=1)", "stage 1 has the patches of the image itself"),
        ("pvt_v2_b0", "dtm(stages=2-5)", "out of range: the model has 4 stages"),
        ("mvitv2_tiny", "dtm", "stages.1.blocks.0 merges the tokens of stage 1 inside its attention"),
        (
            "efficientformerv2_s0",
            "dtm(stages=4)",
            "stages.3.downsample merges the tokens of stage 3 inside its attention",
        ),
        ("maxvit_pico_rw_256", "dtm(variant=paper)", "adds up branches while it merges"),
    ],
)
def test_reasons(refused: Callable[[str, str, str], None], base: str, spec: str, reason: str) -> None:
    refused(base, spec, reason)
