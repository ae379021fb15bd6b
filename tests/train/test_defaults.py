"""What is taken where the user does not say."""

from pathlib import Path

import pytest

from vitrefine.train.defaults import default_folder, default_recipe


@pytest.mark.parametrize(
    ("data", "recipe"),
    [
        ("digits", "digits"),
        ("cifar10:x", "cifar"),
        ("cifar100:y/z", "cifar"),
        ("folder:x", "deit"),
        ("photos", "deit"),
        ("cifar_like_photos", "deit"),
        ("wds:x", "deit_cb_small"),
    ],
)
def test_recipes(data, recipe):
    assert default_recipe(data) == recipe


@pytest.mark.parametrize(
    ("spec", "data", "folder"),
    [
        ("vit_tiny_patch16_224", "digits", "vit_tiny_patch16_224-digits-s3"),
        ("vit_tiny_patch16_224(depth=2)+cb_s", "cifar10:/data/x", "vit_tiny_patch16_224-depth-2-cb_s-cifar10-s3"),
        ("lit_ti", "folder:/data/photos/", "lit_ti-photos-s3"),
        ("lit_ti", "/data/photos", "lit_ti-photos-s3"),
        ("lit_ti", "wds:/d/train-{00..99}.tar::/d/val.tar", "lit_ti-train-s3"),
        ("hf:google/vit", "hf:owner/beans", "hf-google-vit-beans-s3"),
    ],
)
def test_folders(spec, data, folder):
    assert default_folder(spec, data, 3) == Path("runs") / folder


def test_a_long_spec_is_a_name_that_file_systems_take():
    assert len(default_folder("vit" + "+cb" * 200, "digits", 0).name) < 128
