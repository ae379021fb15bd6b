"""Official checkpoints: every shape in which they come, and what is refused.

The checkpoints are our models' weights under the authors' names, which `official_names` restores; that these are the
authors' names is checked against files that their code wrote, if those lie beside the checkout.
"""

import argparse
import pickle
import re
import sys
import types
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.errors import UserError
from vitrefine.layers.position import resize_position
from vitrefine.models.convert import convert, read_checkpoint, rename

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"


BACK = {
    "refiner": [
        (r"(attn)\.refiner\.0\.", r"\1.DLA."),
        (r"(attn)\.refiner\.1\.", r"\1.adapt_bn."),
        (r"DLA\.expand\.0\.", "DLA.conv_exp."),
        (r"DLA\.expand\.1\.", "DLA.bn1."),
        (r"DLA\.local\.", "DLA.depth_sep_conv."),
        (r"DLA\.local_norm\.", "DLA.bn2."),
        (r"DLA\.reduce\.", "DLA.conv_pro."),
        (r"DLA\.reduce_norm\.", "DLA.bn3."),
        (r"attn\.v\.", "attn.qkv."),
        (r"ls2\.gamma", "mlp.scale_channel"),
        (r"patch_embed\.convs\.([036])\.", lambda m: f"patch_embed.conv{int(m[1]) // 3 + 1}."),
        (r"patch_embed\.convs\.([147])\.", lambda m: f"patch_embed.bn{int(m[1]) // 3 + 1}."),
    ],
    "lit_ti": [
        (r"^(patch_embed)\.", r"\g<1>1."),
        (r"^stages\.3\.cls_token$", "cls_token"),
        (r"^stages\.(\d)\.pos_embed$", lambda m: f"pos_embed{int(m[1]) + 1}"),
        (r"^stages\.(\d)\.blocks\.", lambda m: f"block{int(m[1]) + 1}."),
        (r"^stages\.(\d)\.merge\.", lambda m: f"patch_embed{int(m[1]) + 1}."),
        (r"(embed\d)\.offset\.", r"\1.dconv.conv_offset."),
        (r"(embed\d)\.merge\.", r"\1.dconv."),
        (r"(embed[234])\.norm\.", r"\1.norm_layer."),
    ],
    "lit_s": [
        (r"^stages\.(\d)\.blocks\.", r"layers.\1.blocks."),
        (r"^stages\.(\d)\.merge\.", lambda m: f"layers.{int(m[1]) - 1}.downsample."),
        (r"downsample\.offset\.", "downsample.dconv.conv_offset."),
        (r"downsample\.merge\.", "downsample.dconv."),
        (r"downsample\.norm\.", "downsample.norm_layer."),
        (r"position\.table$", "relative_position_bias_table"),
    ],
}
BACK["refined_vit_s"] = BACK["refiner"]


def official_names(model, state):
    """A state dict of ours under the authors' names, with the buffers that only theirs has."""
    official = {}
    for name, tensor in state.items():
        for pattern, replacement in BACK[model]:
            name = re.sub(pattern, replacement, name)
        official[name] = tensor
        if name.endswith("relative_position_bias_table"):
            tokens = ((round(tensor.shape[0] ** 0.5) + 1) // 2) ** 2
            index = torch.zeros(tokens, tokens, dtype=torch.long)
            official[name.replace("bias_table", "index")] = index
    return official


def source_model(name, **kwargs):
    """A model with nothing at zero or one, whose weights are exact in half precision."""
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key or "refiner" in key or key.endswith(("gamma", "running_var", "offset.weight")):
                tensor.add_(torch.rand(tensor.shape).mul(0.1).to(tensor.dtype))
            if tensor.is_floating_point():
                tensor.copy_(tensor.half())
    return model.eval()


def half(state):
    return {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def same_outputs(model, converted, size=224):
    other = timm.create_model(converted.name, **converted.arguments).eval()
    other.load_state_dict(converted.state, strict=True)
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(other(image), model(image), rtol=0, atol=0)
    assert converted.params == sum(parameter.numel() for parameter in model.parameters())


def shapes_only(name, **kwargs):
    """An official checkpoint of the right shapes and next to no size: every weight is one zero, repeated."""
    with torch.device("meta"):
        state = timm.create_model(name, **kwargs).state_dict()
    zeros = {n: torch.zeros((), dtype=t.dtype).expand(t.shape) for n, t in state.items()}
    return official_names(name, zeros)


@pytest.fixture
def save(tmp_path):
    def write(content):
        path = tmp_path / "official.pth"
        torch.save(content, path)
        return path

    return write


@pytest.mark.parametrize(
    ("name", "fixture"),
    [("refined_vit_s", "refiner_vit_tiny_dense"), ("lit_ti", "lit_ti_tiny"), ("lit_s", "lit_s_tiny")],
)
def test_the_names_are_the_authors(name, fixture):
    path = GOLDEN / f"{fixture}.safetensors"
    if not path.exists():
        pytest.skip(f"the authors' outputs ({path.name}) are not beside this checkout")
    arguments = {"token_labels": True} if name == "refined_vit_s" else {}
    with safe_open(path, "pt") as file:
        theirs = {key.removeprefix("state_dict.") for key in file.keys() if key.startswith("state_dict.")}  # noqa: SIM118

    def without_block(names):  # the fixtures have fewer blocks, in the same kinds of stages
        return {re.sub(r"(\bblocks|\bblock\d)\.\d+\.", r"\1.N.", n) for n in names}

    assert without_block(shapes_only(name, **arguments)) == without_block(theirs)


def test_refiner_prefers_averaged_weights_and_drops_the_prefix(save):
    model = source_model("refined_vit_s", token_labels=True)
    state = {f"module.{n}": t for n, t in half(official_names("refined_vit_s", model.state_dict())).items()}
    last = {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in state.items()}
    settings = argparse.Namespace(lr=5e-4, model="refiner_vit_s")
    converted = convert(save({"epoch": 300, "state_dict": last, "state_dict_ema": state, "args": settings}), "refiner")
    assert (converted.name, converted.arguments) == ("refined_vit_s", {"token_labels": True})
    same_outputs(model, converted)


def test_refiner_of_384_without_scales(save):
    model = source_model("refined_vit_s", img_size=384)
    for block in model.blocks:
        torch.nn.init.ones_(block.ls2.gamma)
    state = half(official_names("refined_vit_s", model.state_dict()))
    state = {name: tensor for name, tensor in state.items() if not name.endswith("scale_channel")}
    converted = convert(save({"state_dict": state, "state_dict_ema": None}), "refiner")
    assert (converted.name, converted.arguments) == ("refined_vit_s", {"img_size": 384})
    same_outputs(model, converted, 384)


def test_lit_ti_with_other_classes(save):
    model = source_model("lit_ti", num_classes=7)
    converted = convert(save({"model": half(official_names("lit_ti", model.state_dict()))}), "lit")
    assert (converted.name, converted.arguments) == ("lit_ti", {"num_classes": 7})
    same_outputs(model, converted)


def test_lit_s_with_index_buffers_and_settings(save, monkeypatch):
    class CfgNode(dict):
        pass

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    yacs = types.ModuleType("yacs.config")
    yacs.CfgNode = CfgNode
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", yacs)
    settings = CfgNode(TRAIN=CfgNode(EPOCHS=300))
    settings._immutable = True
    model = source_model("lit_s", img_size=256)
    state = half(official_names("lit_s", model.state_dict()))
    assert any(name.endswith("relative_position_index") for name in state)
    path = save({"model": state, "config": settings, "epoch": 299})
    monkeypatch.delitem(sys.modules, "yacs.config")
    monkeypatch.delitem(sys.modules, "yacs")
    converted = convert(path, "lit")
    assert (converted.name, converted.arguments) == ("lit_s", {"img_size": 256})
    same_outputs(model, converted, 256)


@pytest.mark.parametrize(
    ("source", "name", "like", "arguments"),
    [
        ("refiner", "refined_vit_m", "refined_vit_s", {}),
        ("refiner", "refined_vit_l", "refined_vit_s", {"img_size": 448, "token_labels": True}),
        ("lit", "lit_ti", "lit_ti", {"img_size": 384}),
        ("lit", "lit_m", "lit_s", {}),
        ("lit", "lit_b", "lit_s", {"img_size": 384, "num_classes": 21841}),
    ],
)
def test_every_published_model_is_recognised(save, source, name, like, arguments):
    with torch.device("meta"):
        state = timm.create_model(name, **arguments).state_dict()
    zeros = {n: torch.zeros((), dtype=t.dtype).expand(t.shape) for n, t in state.items()}
    converted = convert(save(official_names(like, zeros)), source)
    assert (converted.name, converted.arguments) == (name, arguments)
    assert {n: t.shape for n, t in converted.state.items()} == {n: t.shape for n, t in state.items()}


def test_the_old_format_is_read(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_checkpoint(tmp_path / "old.pth")["a"].tolist() == [1, 1, 1]


def changed(**changes):
    """A LIT-Ti checkpoint with some weights replaced, or taken out by None."""
    state = {**shapes_only("lit_ti"), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (lambda: changed(extra__weight=torch.zeros(1)), r"has weights left over as lit_ti: extra\.weight$"),
        (lambda: changed(norm__weight=None), r"lacks weights as lit_ti: norm\.weight$"),
        (lambda: changed(norm__weight=torch.zeros(3)), r"has misshapen weights as lit_ti: norm\.weight$"),
        (lambda: changed(norm__weight=torch.zeros(512).long()), r"has misshapen weights as lit_ti: norm\.weight$"),
        (lambda: changed(pos_embed1=torch.zeros(1, 3100, 64)), "has misshapen weights as lit_ti: stages.0.pos_embed"),
        (lambda: changed(pos_embed1=torch.zeros(1, 3000, 64)), "cannot be converted: an image of 220x220 does not fit"),
        (lambda: changed(pos_embed1=torch.zeros(())), "fewer dimensions"),
        (lambda: changed(head__weight=torch.zeros(())), "fewer dimensions"),
        (lambda: changed(head__weight=None), "lacks 'head.weight'"),
        (lambda: {n: t for n, t in shapes_only("lit_ti").items() if "block3.5" not in n}, "64 wide and 5 blocks deep"),
        (lambda: shapes_only("refined_vit_s"), r"is a checkpoint of refiner, not of lit; say --from refiner$"),
        (lambda: torch.nn.Linear(2, 2).state_dict(), "lacks 'patch_embed.proj.weight', so it is no lit model"),
        (lambda: [1, 2, 3], "holds no weights"),
        (dict, "holds no weights"),
        (lambda: {"model": {"a": "text"}}, "holds no weights"),
        (lambda: torch.nn.Linear(2, 2), r"carries torch\.nn\.modules\.linear\.Linear, which may run code"),
    ],
)
def test_weights_that_do_not_fit(save, content, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        convert(save(content()), "lit")
    assert "\n" not in str(refused.value)


def test_a_refiner_with_some_scales_is_not_completed(save):
    state = shapes_only("refined_vit_s")
    del state["blocks.3.mlp.scale_channel"]
    with pytest.raises(UserError, match=r"lacks weights as refined_vit_s: blocks\.3\.ls2\.gamma"):
        convert(save(state), "refiner")


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("format", ["zip", "old", "pickle"])
def test_code_in_a_checkpoint_never_runs(tmp_path, format):
    marker, path = tmp_path / "marker", tmp_path / "evil.pth"
    content = {"state_dict": shapes_only("lit_ti"), "best": Malicious(marker)}
    if format == "pickle":
        path.write_bytes(pickle.dumps(Malicious(marker), protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=format == "zip")
    torch.load(path, weights_only=False) if format != "pickle" else pickle.loads(path.read_bytes())
    assert marker.exists(), "the file is no danger, so this test shows nothing"
    marker.unlink()
    with pytest.raises(UserError, match="may run code, so it was not loaded"):
        convert(path, "lit")
    assert not marker.exists()


def test_an_unknown_source(save):
    with pytest.raises(UserError, match="no converter from 'swin'; choose one of refiner, lit"):
        convert(save(shapes_only("lit_ti")), "swin")
    with pytest.raises(UserError, match="no converter from 'swin'"):
        rename({}, "swin")


@pytest.mark.parametrize("name", ["refined_vit_s", "lit_ti", "lit_s", "pvt_small"])
@pytest.mark.parametrize("size", [96, (64, 128)])
def test_weights_of_another_size_load_through_timm(tmp_path, name, size):
    if name == "refined_vit_s":
        small = {"embed_dim": 24, "depth": 2, "num_heads": 4}
    else:
        small = {"embed_dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 4)}
    model = timm.create_model(name, img_size=64, **small)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    other = timm.create_model(name, img_size=size, pretrained=True, pretrained_cfg_overlay=overlay, **small)
    ours, theirs = model.state_dict(), other.state_dict()
    resized = {n for n in ours if not torch.equal(ours[n], theirs[n])}
    assert resized == {n for n in ours if n.endswith(("pos_embed", "position.table"))}
    height, width = (size, size) if isinstance(size, int) else size
    if name == "lit_s":
        ours = {n: t[None] for n, t in ours.items()}
        theirs = {n: t[None] for n, t in theirs.items()}
    for n in resized:
        step = 16 if name == "refined_vit_s" else 4 << int(n.split(".")[1])
        old, new = (64 // step, 64 // step), (height // step, width // step)
        if name == "lit_s":
            old, new = (2 * old[0] - 1, 2 * old[1] - 1), (2 * new[0] - 1, 2 * new[1] - 1)
        torch.testing.assert_close(theirs[n], resize_position(ours[n], old, new), rtol=0, atol=0)
    # Loading at the size that the weights were made for changes nothing.
    same = timm.create_model(name, img_size=64, pretrained=True, pretrained_cfg_overlay=overlay, **small)
    assert all(torch.equal(tensor, model.state_dict()[n]) for n, tensor in same.state_dict().items())


def test_a_token_labelling_model_loads_for_other_classes(tmp_path):
    small = {"embed_dim": 24, "depth": 2, "num_heads": 4, "token_labels": True}
    model = timm.create_model("refined_vit_s", **small)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    other = timm.create_model("refined_vit_s", num_classes=5, pretrained=True, pretrained_cfg_overlay=overlay, **small)
    assert other.aux_head.out_features == 5
    torch.testing.assert_close(other.blocks[1].attn.v.weight, model.blocks[1].attn.v.weight)
