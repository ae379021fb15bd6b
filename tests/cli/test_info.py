"""Sizes, specs and complaints of `vitrefine info`, called as functions; tests/system runs the command itself."""

import sys
from pathlib import Path

import pytest
import timm
import transformers

from vitrefine.cli import info, main
from vitrefine.cli.info import build, cost_of, parse_size, show_count, show_size
from vitrefine.errors import UserError


@pytest.mark.parametrize(("text", "size"), [("384", (384, 384)), ("256x320", (256, 320))])
def test_parse_size(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size
    assert show_size(size) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "12y", "224x", "x224", "1x2x3", "22.5", "0x224"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="write 224, or 256x320"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (22_050_664, "22.05 M"), (4_600_000_000, "4.60 G"), (10**12, "1.00 T")]
)
def test_show_count(count: int, text: str) -> None:
    assert show_count(count) == text


def test_nothing_is_allocated() -> None:
    model, size, channels = build("vit_small_patch16_224")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert (size, channels) == ((224, 224), 3)


def test_models_of_transformers(tmp_path: Path) -> None:
    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 16}
    transformers.ViTConfig(**small, image_size=32, architectures=["ViTModel"]).save_pretrained(tmp_path / "vit")
    transformers.BertConfig(**small, architectures=["BertModel"]).save_pretrained(tmp_path / "bert")
    assert cost_of(f"hf:{tmp_path}/vit+cb").size == (32, 32)
    own, larger = cost_of(f"hf:{tmp_path}/vit"), cost_of(f"hf:{tmp_path}/vit", (64, 32))
    assert larger.params - own.params == (4 * 2 - 2 * 2) * 12  # position embeddings
    with pytest.raises(UserError, match="takes input_ids; info counts what an image costs"):
        cost_of(f"hf:{tmp_path}/bert")


def test_arguments_of_the_base() -> None:
    cost = cost_of("vit_tiny_patch16_224(img_size=32,patch_size=4,in_chans=1)")
    assert cost.size == (32, 32)
    assert cost.stages[0].macs == 64 * 192 * 16


def test_size_goes_to_models_that_fix_theirs() -> None:
    own, larger = cost_of("vit_tiny_patch16_224"), cost_of("vit_tiny_patch16_224", (384, 256))
    assert larger.params - own.params == (24 * 16 - 14 * 14) * 192  # position embeddings
    assert larger.size == (384, 256)
    own, larger = cost_of("torchvision:vit_b_16"), cost_of("torchvision:vit_b_16", (256, 256))
    assert larger.params - own.params == (16 * 16 - 14 * 14) * 768


def test_size_of_models_that_take_any() -> None:
    assert cost_of("resnet18", (64, 96)).params == cost_of("resnet18").params
    assert cost_of("resnet18", (64, 96)).macs < cost_of("resnet18").macs


@pytest.mark.parametrize(
    ("name", "size", "near"),
    [
        ("vit_tiny_patch16_224", (225, 225), "224, 240"),
        ("vit_small_patch14_dinov2", (225, 300), "224x294, 238x308"),
        ("vit_tiny_patch16_224", (9, 9), "16, 32"),
        ("lit_ti", (225, 225), "224, 256"),
    ],
)
def test_sizes_a_model_cannot_take(name: str, size: tuple[int, int], near: str) -> None:
    with pytest.raises(UserError) as caught:
        cost_of(name, size)
    assert str(caught.value) == f"{name} cannot take {size[0]}x{size[1]}; nearest sizes it can: {near}"


def test_a_size_with_no_good_neighbour() -> None:
    with pytest.raises(UserError, match="cannot take 4000000x4000000; its own is 224"):
        cost_of("vit_tiny_patch16_224", (4_000_000, 4_000_000))


def test_unknown_names() -> None:
    with pytest.raises(UserError, match=r"no model 'vit_smal_patch16_224'; did you mean vit_small_patch16_224, "):
        cost_of("vit_smal_patch16_224", (225, 225))


@pytest.mark.parametrize("spec", ["vit_tiny_patch16_224(depht=3)", "vit_tiny_patch16_224.no_such_tag"])
@pytest.mark.parametrize("size", [None, (224, 224)])
def test_models_that_cannot_be_made(spec: str, size: tuple[int, int] | None) -> None:
    with pytest.raises(UserError, match=r"depht|no_such_tag") as caught:
        cost_of(spec, size)
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_model_is_not_blamed_on_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise NotImplementedError("a bug")

    monkeypatch.setattr(timm.models.ResNet, "forward", broken)
    with pytest.raises(NotImplementedError, match="a bug"):
        cost_of("resnet18", (64, 64))


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "cost_of", interrupt)
    monkeypatch.setattr(sys, "argv", ["vitrefine", "info", "resnet18"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "vitrefine: interrupted\n"
