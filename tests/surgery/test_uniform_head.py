"""A uniform head in models that exist: against the layer that is made for it, by either path, and honestly counted."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer

from vitrefine.errors import UserError
from vitrefine.layers.uniform_head import UniformHeadAttention
from vitrefine.surgery.operate import apply
from vitrefine.surgery.uniform_head import UniformHead, idle_parameters

MODES = ("replace", "widen", "append")


def timm_model(name: str, *, fused: bool = True, **options: Any) -> nn.Module:
    """In double precision and with weights large enough for attention to be far from uniform by itself."""
    torch.manual_seed(0)
    set_fused_attn(fused)
    try:
        model = timm.create_model(name, **options).double().eval()
    finally:
        set_fused_attn(True)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.05)
    return model


def vit(*, fused: bool = True) -> Any:
    return timm_model("vit_tiny_patch16_224", fused=fused, img_size=32, patch_size=8, depth=2, num_classes=5)


def image(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["replace", "append"])
def test_equals_the_layer(mode: str, fused: bool) -> None:
    ours, layers = vit(fused=fused), vit()
    apply(ours, "uniform_head", mode=mode)
    for plain, block in zip(ours.blocks, layers.blocks, strict=True):
        layer = UniformHeadAttention(192, 3, mode, dtype=torch.float64)
        layer.load_state_dict(block.attn.state_dict(), strict=mode == "replace")
        if mode == "append":
            nn.init.normal_(plain.attn.uniform_branch.proj)
            layer.uniform_proj.data.copy_(plain.attn.uniform_branch.proj)
            layer.uniform_value.weight.data.copy_(plain.attn.uniform_branch.value.weight)
            nn.init.zeros_(layer.uniform_value.bias)
        block.attn = layer
    torch.testing.assert_close(ours(image()), layers(image()), rtol=0, atol=1e-12)


def test_widen_is_both() -> None:
    widened, replaced, appended = vit(), vit(), vit()
    for model, mode in ((widened, "widen"), (replaced, "replace"), (appended, "append")):
        apply(model, "uniform_head", mode=mode, layers=0)
    branch = widened.blocks[0].attn.uniform_branch
    nn.init.normal_(branch.proj)
    appended.blocks[0].attn.uniform_branch.load_state_dict(branch.state_dict())
    x = torch.randn(2, 5, 192, dtype=torch.float64)
    attentions = [model.blocks[0].attn for model in (widened, replaced, appended, vit())]
    both, only_replaced, only_appended, plain = (attention(x) for attention in attentions)
    torch.testing.assert_close(both, only_replaced + only_appended - plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("swin_tiny_patch4_window7_224", 56, {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6)}),
        ("beit_base_patch16_224", 32, {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 4}),
        ("pvt_v2_b0", 64, {}),
    ],
)
def test_both_paths_agree(name: str, size: int, options: dict[str, Any], mode: str) -> None:
    """Relative biases, shifted windows and reduced keys: fused or not, a uniform head sees the same."""
    results = []
    for fused in (True, False):
        model = timm_model(name, fused=fused, num_classes=5, **options)
        apply(model, "uniform_head", mode=mode)
        for module in model.modules():
            if isinstance(module, UniformHead) and module.uniform_branch is not None:
                torch.manual_seed(2)
                for parameter in module.uniform_branch.parameters():
                    nn.init.normal_(parameter, std=0.1)
        results.append(model(image(size)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_a_uniform_head_is_one_to_the_refiner_too() -> None:
    """Fused or not, the refiner is given the uniform map, and not what the head attended to before."""
    results = []
    for fused in (True, False):
        model = vit(fused=fused)
        apply(model, "uniform_head+refiner")
        for block in model.blocks:
            torch.manual_seed(2)
            for parameter in block.attn.refiner.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        results.append(model(image()))
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    for block in model.blocks:
        with torch.no_grad():  # the last third of queries belongs to the last head of three: it must not matter
            block.attn.qkv.weight[128:192] += 1
    torch.testing.assert_close(model(image()), results[0], rtol=0, atol=1e-10)


class Pool(nn.Module):
    """Learned queries that attend to the patches of an image: the keys are other tokens than the queries."""

    img_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 2, 2)
        self.queries = nn.Parameter(torch.randn(1, 5, 12))
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def patches(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.patches(x)
        return self.attention(self.queries.expand(len(x), -1, -1), keys, keys)[0]


def test_append_averages_keys_and_not_queries() -> None:
    torch.manual_seed(0)
    model = Pool().double().eval()
    before = model(image(8))
    apply(model, "uniform_head(mode=append)")
    branch: Any = model.attention.uniform_branch
    nn.init.normal_(branch.proj)
    added = branch.value(model.patches(image(8))).mean(dim=1, keepdim=True) @ branch.proj.T
    torch.testing.assert_close(model(image(8)), before + added)


def test_dropout_and_training() -> None:
    model = timm_model("vit_tiny_patch16_224", img_size=32, depth=1, attn_drop_rate=0.5).train()
    apply(model, "uniform_head", mode="widen")
    assert not torch.equal(model(image()), model(image()))


@pytest.mark.parametrize(("mode", "new"), [("replace", 0), ("widen", 589_824), ("append", 589_824)])
def test_parameters_of_vit_small(mode: str, new: int) -> None:
    """As the layer: 22,050,664 with 21,459,304 that act; `widen` gives 2·C·d a block back, all but the biases."""
    model = timm.create_model("vit_small_patch16_224", device="meta")
    report = apply(model, "uniform_head", mode=mode)
    assert report.new_parameters == new == (0 if mode == "replace" else 12 * 2 * 384 * 64)
    assert idle_parameters(model) == (0 if mode == "append" else 591_360)
    acting = "21,459,304 of 22,050,664 act"
    assert (acting in str(report)) == (mode == "replace")
    assert ": 12 changes, " in str(report)
    assert str(report).count("49,280 parameters idle") == (0 if mode == "append" else 12)


def without_gradient(model: nn.Module, size: int) -> dict[str, int]:
    """How many numbers in each parameter have no gradient for any of some images; for one, it may be by accident."""
    zero: dict[str, Tensor] = {}
    for x in torch.randn(6, 2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        model.zero_grad()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                zero[name] = zero.get(name, torch.tensor(True)) & (parameter.grad == 0)
    return {name: int(numbers.sum()) for name, numbers in zero.items()}


MEASURED: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "vit_small_patch16_rope_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 4}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 4}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (2, 2), "num_heads": (3, 6)}),
    "pvt_v2_b0": (64, {}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "convit_tiny": (32, {"img_size": 32, "depth": 3, "local_up_to_layer": 2}),
    "crossvit_tiny_240": (240, {"depth": ((1, 1, 0),)}),
    "levit_128s": (224, {}),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 2}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "torchvision-vit": (32, {}),
    "torchvision-swin": (32, {}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_idle_parameters_are_those_without_a_gradient(name: str) -> None:
    size, options = MEASURED[name]
    if name == "torchvision-vit":
        torch.manual_seed(0)
        model: nn.Module = VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5).double().eval()
        nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]
    elif name == "torchvision-swin":
        torch.manual_seed(0)
        model = SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5).double().eval()
    else:
        model = timm_model(name, num_classes=5, **options)
    model.train(name.startswith("levit"))  # in evaluation it keeps its biases from the first image on
    before = without_gradient(model, size)
    apply(model, "uniform_head")
    after = without_gradient(model, size)
    for where, attention in model.named_modules():
        if isinstance(attention, UniformHead):
            already, now = (sum(n for key, n in c.items() if key.startswith(f"{where}.")) for c in (before, after))
            # What idled before, such as a bias that no pair of tokens uses, may be the last head's or another's.
            assert now - already <= attention.idle_parameters <= now
            assert attention.idle_parameters > 0


def test_attentions_with_a_single_head_are_left_and_named() -> None:
    model: Any = timm.create_model("pvt_v2_b0", device="meta")  # 1, 2, 5 and 8 heads in its stages
    report = apply(model, "uniform_head")
    assert not any(isinstance(m, UniformHead) for m in model.stages[0].modules())
    assert sum(isinstance(m, UniformHead) for m in model.modules()) == 6
    assert report.changes[-1].where == ""
    assert report.changes[-1].what.startswith("2 left as they were, Attention: it has a single head")


@pytest.mark.parametrize(
    ("name", "options", "spec", "reason"),
    [
        ("resnet18", {}, "uniform_head", "has no attention"),
        ("vit_tiny_patch16_224", {"num_heads": 1}, "uniform_head", "it has a single head.*mode=append"),
        ("xcit_nano_12_p16_224", {"cls_attn_layers": 0}, "uniform_head", "its maps relate channels, not tokens"),
        ("vit_tiny_patch16_224", {}, "refiner+uniform_head", r"\+uniform_head\+refiner"),
        ("vit_tiny_patch16_224", {}, "uniform_head+uniform_head", "twice"),
        ("vit_tiny_patch16_224", {}, "uniform_head(mode=add)", "replace, widen or append"),
        ("vit_tiny_patch16_224", {}, "uniform_head(layers=99)", "out of range"),
    ],
)
def test_reasons(name: str, options: dict[str, Any], spec: str, reason: str) -> None:
    model = timm.create_model(name, device="meta", **options)
    before = {key: type(module) for key, module in model.named_modules()}
    with pytest.raises(UserError, match=reason):
        apply(model, spec)
    assert {key: type(module) for key, module in model.named_modules()} == before
