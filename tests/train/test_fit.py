"""Models fitted to data: classes, channels, size and patches."""

from types import SimpleNamespace

import pytest

from vitrefine.errors import UserError
from vitrefine.surgery.spec import parse
from vitrefine.train.fit import fit, fitted
from vitrefine.train.recipe import load_recipe


def data(size=(32, 32), channels=3, classes=10):
    return SimpleNamespace(name="toy", size=size, channels=channels, classes=tuple(map(str, range(classes))))


def recipe(*overrides):
    return load_recipe("digits", overrides)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224(img_size=32,num_classes=10,patch_size=4)"),
        ("vit_tiny_patch16_224+cb", "vit_tiny_patch16_224(img_size=32,num_classes=10,patch_size=4)+cb"),
        ("vit_tiny_patch16_224(patch_size=8)", "vit_tiny_patch16_224(img_size=32,num_classes=10,patch_size=8)"),
        ("vit_tiny_patch16_224(img_size=64)", "vit_tiny_patch16_224(img_size=64,num_classes=10,patch_size=8)"),
        ("mixer_s32_224", "mixer_s32_224(img_size=32,num_classes=10)"),  # it sets its patches itself
        ("lit_ti", "lit_ti(img_size=32,num_classes=10)"),
        ("resnet18", "resnet18(num_classes=10)"),
        ("torchvision:vit_b_16", "torchvision:vit_b_16(image_size=32,num_classes=10)"),
    ],
)
def test_specs(spec, expected):
    assert str(fitted(spec, data(), recipe())) == expected
    assert fitted(expected, data(), recipe()) == parse(expected)  # what is said stays


def test_what_was_done_is_said():
    said = []
    fit("vit_tiny_patch16_224", data(), recipe(), say=said.append)
    assert said == ["vit_tiny_patch16_224 cuts images of 32x32 into 2x2 patches; patch_size=4 is used instead"]
    fit("vit_tiny_patch16_224(patch_size=16)", data(), recipe(), say=said.append)
    fit("vit_tiny_patch16_224", data((224, 224)), recipe(), say=said.append)
    fit("vit_tiny_patch16_224", data(), recipe(), weights="pretrained", say=said.append)
    assert len(said) == 1


def test_size():
    """Brackets go before the recipe, that before the data, and that before the model."""
    assert fit("vit_tiny_patch16_224(img_size=96)", data(), recipe("data.size=64")).size == (96, 96)
    assert fit("vit_tiny_patch16_224", data(), recipe("data.size=64")).size == (64, 64)
    assert fit("vit_tiny_patch16_224", data((48, 32)), recipe()).size == (48, 32)
    assert fit("resnet18", data(), recipe()).size == (32, 32)
    own = fit("vit_tiny_patch16_384", data(None), recipe())
    assert (str(own.spec), own.size) == ("vit_tiny_patch16_384(num_classes=10)", (384, 384))


def test_channels_and_classes():
    grey = fitted("vit_tiny_patch16_224", data(channels=1), recipe())
    assert grey.base.args["in_chans"] == 1
    with pytest.raises(UserError, match=r"has 7 classes, but toy has 10; leave them out"):
        fitted("vit_tiny_patch16_224(num_classes=7)", data(), recipe())
    with pytest.raises(UserError, match="did you mean vit_tiny_patch16_224"):
        fitted("vit_tny_patch16_224", data(), recipe())


def test_the_loss_may_call_for_a_head():
    spec = fitted("refined_vit_s", data((224, 224)), recipe("loss.token_labels.weight=0.5"))
    assert spec.base.args["token_labels"] is True
    for other in ("vit_tiny_patch16_224", "resnet10t", "swin_tiny_patch4_window7_224"):
        with pytest.raises(UserError, match=f"loss.token_labels needs a classifier of patches, which {other} cannot"):
            fitted(other, data((32, 32)), recipe("loss.token_labels.weight=0.5"))
