"""Squeeze-and-excitation at the end of the MLPs of models that exist."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply
from vitrefine.surgery.squeeze_excitation import ExcitedAfter


def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=5).double().eval()


def test_excites_what_the_mlp_gives() -> None:
    plain, changed = vit(), vit()
    report = apply(changed, "se", reduction=4)
    assert report.new_parameters == 4 * (2 * 192 * 48 + 192 + 48)
    x = torch.randn(2, 5, 192, dtype=torch.float64)
    part = changed.blocks[1].mlp.excitation
    assert part.fc1.out_features == 48
    torch.testing.assert_close(changed.blocks[1].mlp(x), part(plain.blocks[1].mlp(x)))


def test_layers() -> None:
    model = vit()
    report = apply(model, "se(layers=upper)")
    assert [change.where for change in report.changes] == ["blocks.2.mlp", "blocks.3.mlp"]
    assert sum(isinstance(module, ExcitedAfter) for module in model.modules()) == 2


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("vit_tiny_patch16_224", "NLC"),
        ("mixer_s32_224", "NLC"),
        ("maxvit_rmlp_pico_rw_256", "NHWC"),
        ("coatnet_pico_rw_224", "NCHW"),
    ],
)
def test_layouts(name: str, layout: str) -> None:
    """Every channel of an image has one gate, whatever the token."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=5).eval()
    apply(model, "se")
    seen: list[tuple[Tensor, Tensor]] = []
    excitations: list[Any] = [module.excitation for module in model.modules() if isinstance(module, ExcitedAfter)]
    for excitation in excitations:
        excitation.register_forward_hook(lambda _, given, gave: seen.append((given[0], gave)))
    with torch.no_grad():
        model(torch.randn(2, *model.pretrained_cfg["input_size"]))
    assert len(seen) == len(excitations) > 0
    assert {excitation.layout for excitation in excitations} == {layout}
    for excitation, (given, gave) in zip(excitations, seen, strict=True):
        given, gave = (x.movedim(1 if layout == "NCHW" else -1, 1).flatten(2) for x in (given, gave))
        assert given.shape[1] == excitation.fc1.in_features
        gate = gave.abs().sum(dim=2, keepdim=True) / given.abs().sum(dim=2, keepdim=True)
        torch.testing.assert_close(gave, given * gate)


def test_lies_on_a_broadcast_that_is_there() -> None:
    model, plain = vit(), vit()
    apply(model, "cb(layers=all)+se")
    x = torch.randn(2, 5, 192, dtype=torch.float64)
    y = plain.blocks[0].mlp(x)
    expected = model.blocks[0].mlp.excitation((y + y.mean(dim=1, keepdim=True)) / 2)
    torch.testing.assert_close(model.blocks[0].mlp(x), expected)
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(strip(model)(image), plain(image))


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("resnet18", "se", "convolution or pooling only"),
        ("vit_tiny_patch16_224", "se(reduction=500)", "cannot reduce 192 channels 500 times"),
        ("vit_tiny_patch16_224", "se+se", "twice"),
    ],
)
def test_reasons(name: str, spec: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        apply(timm.create_model(name, device="meta"), spec)
