"""The base of a spec: found in four libraries, and one sentence for whatever goes wrong. Nothing is downloaded."""

import json
import sys
import urllib.error
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from vitrefine.errors import UserError
from vitrefine.surgery.base import build
from vitrefine.surgery.spec import Call, Range, parse

VIT = {
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face model as `save_pretrained` leaves it, in a folder whose name needs quotes."""
    path = tmp_path / "my models" / "vit"
    torch.manual_seed(0)
    transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3)).save_pretrained(path)
    return path


def made(text: str, **overrides: Any) -> Any:
    return build(parse(text).base, **overrides)


def refusal(text: str, **overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        made(text, **overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_timm() -> None:
    model = made("vit_tiny_patch16_224(img_size=32,patch_size=4,depth=2)", num_classes=7)
    assert isinstance(model, timm.models.VisionTransformer)
    assert len(model.blocks) == 2
    assert model.patch_embed.grid_size == (8, 8)
    assert model.num_classes == 7


def test_overrides_win() -> None:
    assert made("vit_tiny_patch16_224(depth=2)", depth=1).num_classes == 1000
    assert len(made("vit_tiny_patch16_224(depth=2)", depth=1).blocks) == 1


def test_models_of_this_package() -> None:
    assert type(made("lit_ti", device="meta")).__module__.startswith("vitrefine.models")


def test_tags_and_lists() -> None:
    assert made("vit_tiny_patch16_224.augreg_in21k(depth=1)").num_classes == 21843
    model = build(Call("resnet18", {"features_only": True, "out_indices": Range(1, 3)}))
    assert model.feature_info.out_indices == (1, 2, 3)
    model = build(Call("resnet18", {"features_only": True, "out_indices": (0, Range(2, 3))}))
    assert model.feature_info.out_indices == (0, 2, 3)
    swin = made("swin_tiny_patch4_window7_224(depths=[1,1],num_heads=[3,6],img_size=[56,28],window_size=7)")
    assert [len(stage.blocks) for stage in swin.layers] == [1, 1]


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in made("vit_tiny_patch16_224(depth=1)").parameters())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vit_tiny_patch16_225", "did you mean vit_tiny_patch16_224"),
        ("lit_tii", "did you mean lit_ti"),
        ("qqqqqqqq", "there is no model 'qqqqqqqq'"),
        ("vit_tiny_patch16_224.nothing", "did you mean vit_tiny_patch16_224.augreg_in21k"),
        ("vit_tiny_patch16_224(depht=2)", "vit_tiny_patch16_224 takes no argument depht"),
        ("vit_tiny_patch16_224(embed_dim=10)", "cannot be made"),
        ("torchvision:vit_b_17", "did you mean vit_b_16"),
        ("torchvision:vit_b_16(depth=2)", "torchvision:vit_b_16 takes no argument depth"),
        ("torchvision:vit_b_16(num_layers=2)", "torchvision:vit_b_16 sets num_layers itself"),
        ("torchvision:vit_b_16(weights=best)", "there is no 'best'"),
        ("hf:./nowhere", "there is no folder ./nowhere"),
        ("hf:~/no/where", "there is no folder ~/no/where"),
        ("hf:nobody/nothing", "hf:nobody/nothing cannot be fetched"),
        ("hf:'no id at all'", "is not there"),
        ("hf_hub:nobody/nothing", "hf_hub:nobody/nothing cannot be fetched"),
        ("vit_tiny_patch16_224(pretrained=true)", "vit_tiny_patch16_224 cannot be fetched"),
    ],
)
def test_one_sentence(text: str, words: str) -> None:
    assert words in refusal(text)


def test_a_model_that_takes_any_size_says_so_by_name() -> None:
    """`vitrefine info` asks again without the size when the sentence names it."""
    assert "img_size" in refusal("resnet18", img_size=(64, 64))


def test_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("torchvision:vit_b_16(image_size=32,num_classes=3)", weights=None)
    assert isinstance(model, torchvision.models.VisionTransformer)
    assert model.image_size == 32

    def no_connection(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("no connection")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_connection)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert "its server cannot be reached" in refusal("torchvision:resnet18(pretrained=true)")


def test_a_folder(folder: Path) -> None:
    model = made(f'hf:"{folder}"')
    assert isinstance(model, transformers.ViTForImageClassification)
    assert model.config.hidden_size == 12
    changed = made(f'hf:"{folder}"(image_size=16,attn_implementation=eager)', num_labels=5)
    assert changed.config.image_size == 16
    assert changed.config._attn_implementation == "eager"
    assert changed.classifier.out_features == 5


def test_weights_of_a_folder(folder: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(folder).state_dict()
    fresh = made(f'hf:"{folder}"').state_dict()
    loaded = made(f'hf:"{folder}"', pretrained=True).state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert not torch.equal(fresh["classifier.weight"], saved["classifier.weight"])


def test_weights_are_of_single_precision(folder: Path) -> None:
    transformers.ViTForImageClassification.from_pretrained(folder).half().save_pretrained(folder)
    for pretrained in (False, True):
        model: nn.Module = made(f'hf:"{folder}"', pretrained=pretrained)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_are_never_unpickled(folder: Path) -> None:
    model = transformers.ViTForImageClassification.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "safetensors" in refusal(f'hf:"{folder}"', pretrained=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.ViTConfig(**VIT), transformers.ViTForImageClassification),
        (transformers.ViTConfig(**VIT, architectures=["ViTModel"]), transformers.ViTModel),
        (transformers.ViTConfig(**VIT, architectures=["NoSuchModel"]), transformers.ViTForImageClassification),
        (transformers.ViTConfig(**VIT, architectures=["set_seed", "Trainer"]), transformers.ViTForImageClassification),
        (transformers.DeiTConfig(**VIT), transformers.DeiTForImageClassification),
        (transformers.BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=3), transformers.BertModel),
    ],
)
def test_class(tmp_path: Path, config: Any, expected: type) -> None:
    config.save_pretrained(tmp_path)
    assert type(made(f'hf:"{tmp_path}"')) is expected


def test_code_that_a_model_brings_does_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this code ran')")
    assert "cannot be made" in refusal(f'hf:"{folder}"')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("hidden_siz=3", "ViTConfig has no hidden_siz; did you mean hidden_size?"),
        ("qqqqqq=3", "ViTConfig has no qqqqqq"),
        ("hidden_size=wide", "hidden_size"),
        ("pretrained=true,image_size=64", "cannot be made"),
    ],
)
def test_sentences_about_a_folder(folder: Path, arguments: str, words: str) -> None:
    assert words in refusal(f'hf:"{folder}"({arguments})')


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "config.json" in refusal(f'hf:"{tmp_path}"')
    (tmp_path / "config.json").write_text("{ broken")
    assert "config" in refusal(f'hf:"{tmp_path}"')


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal("hf:someone/something") == "transformers is not installed; pip install 'vitrefine[nlp]'"
