"""A checkpoint rebuilds its model by itself, loses nothing when a write fails, and says what is wrong with it."""

import errno
import json
import os
import pickle
import shutil
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import vitrefine
from vitrefine.errors import UserError
from vitrefine.surgery import broadcast, checkpoint, registry
from vitrefine.surgery.checkpoint import load, save
from vitrefine.surgery.create import create, rebuild, report_of, spec_of
from vitrefine.surgery.graft import strip
from vitrefine.surgery.hub import save_folder
from vitrefine.surgery.inputs import example_inputs
from vitrefine.surgery.operate import apply
from vitrefine.surgery.selection import Layers
from vitrefine.surgery.spec import parse
from vitrefine.surgery.weights import KEY, read, write

SMALL_LIT = "lit_ti(depths=[1,1,1,1],embed_dims=[16,32,64,64],img_size=64,num_classes=5,num_heads=[1,1,2,2])"
SMALL_SWIN = "swin_tiny_patch4_window7_224(depths=[2,2],embed_dim=24,img_size=112,num_heads=[2,2])"
SMALL_EVA = "eva02_tiny_patch14_224(depth=2)"
SPECS = [
    "test_vit",
    "test_vit(num_classes=3,img_size=96)+refiner(share=1)+cb_s",
    "test_vit+uniform_head(mode=append)+cb(position=front,layers=[0,2])",
    "test_vit2+se+cb_gate",
    f"{SMALL_LIT}+refiner+cb",
    f"{SMALL_SWIN}+refiner+cb_s",
    f"{SMALL_EVA}+refiner(variant=official)",
    "levit_128s(num_classes=3)+cb_s",
    f"{SMALL_SWIN}+dtm+cb",
    f"{SMALL_SWIN}+less_attention(stages=1)+dtm(variant=paper)",
    "torchvision:swin_t(num_classes=3)+cb_s",
]


def shaken(model: nn.Module) -> nn.Module:
    """With weights and statistics that no initialisation gives."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator).to(tensor.dtype), alpha=0.02)
    return model.eval()


def inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(like.shape, generator=generator).to(dtype) if like.is_floating_point() else like
        for name, like in example_inputs(model).items()
    }


def outputs(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        out = model(*[v for k, v in given.items() if not k], **{k: v for k, v in given.items() if k})
    return out if isinstance(out, torch.Tensor) else out[0]


def tables(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.named_buffers() if name not in model.state_dict()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert str(one) == str(other)
    assert spec_of(one) == spec_of(other)
    for mine, its in ((one.state_dict(), other.state_dict()), (tables(one), tables(other))):
        assert mine.keys() == its.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == its[name].dtype, name
            assert torch.equal(tensor, its[name]), name
    given = inputs(one)
    assert torch.equal(outputs(one, given), outputs(other, given))


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("spec", SPECS)
def test_round_trip(spec, file):
    model = shaken(create(spec))
    assert save(model, file) is None
    loaded = load(file)
    assert not loaded.training
    assert_same(model, loaded)
    assert report_of(loaded) == report_of(model)
    assert all(p.requires_grad for p in loaded.parameters())
    loaded.train()
    assert list(file.parent.iterdir()) == [file]


def test_tables_that_are_in_no_checkpoint_are_there(file):
    save(create(f"{SMALL_SWIN}+cb"), file)
    assert not any("relative_position_index" in name or "attn_mask" in name for name in load_file(file))
    loaded = load(file)
    assert {name.rpartition(".")[2] for name in tables(loaded)} >= {"relative_position_index", "attn_mask"}
    assert loaded.layers[0].blocks[1].attn_mask.unique().tolist() == [-100.0, 0.0]


def test_a_model_without_such_tables_is_never_initialised(file, monkeypatch):
    save(shaken(create("test_vit+refiner+cb_s")), file)
    made = []
    monkeypatch.setattr(checkpoint, "rebuild", lambda *a, **k: made.append(rebuild(*a, **k)) or made[-1])
    before = torch.random.get_rng_state()
    load(file)
    assert len(made) == 1
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precision_is_kept(dtype, file):
    model = shaken(create(f"{SMALL_SWIN}+cb_s").to(dtype))
    save(model, file)
    assert_same(model, load(file))


VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
SWIN = {
    "model_type": "swin",
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
}
CLIP = {"model_type": "clip", "vision_config": {name: VIT[name] for name in VIT if name != "model_type"}}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}


def of_transformers(config: dict, rest: str, folder: Path) -> nn.Module:
    """A model made from a folder that is gone afterwards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = shaken(create(f'hf:"{folder}"{rest}'))
    (folder / "config.json").unlink()
    folder.rmdir()
    return model


@pytest.mark.parametrize(
    ("config", "rest"),
    [
        (VIT, "(num_labels=3)+refiner+cb_s"),
        (SWIN, "+cb"),
        (CLIP, "(num_labels=3)+refiner"),
        (BERT, "+refiner"),
        (BERT | {"architectures": None}, "+cb_s"),
    ],
)
def test_a_model_of_transformers_needs_neither_its_folder_nor_the_hub(config, rest, file, tmp_path):
    folder = tmp_path / "original"
    model = of_transformers(config, rest, folder)
    save(model, file)
    loaded = load(file)
    assert_same(model, loaded)
    assert str(spec_of(loaded)) == f"hf:{folder}{rest}"
    assert loaded.config.name_or_path == str(folder)
    if config is BERT:
        assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight


def test_a_swin_of_transformers_can_be_saved_when_it_has_run(file, tmp_path):
    model = of_transformers(SWIN | {"image_size": 16}, "+cb", tmp_path / "original").eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(images).logits  # the last stage has a single window, so that nothing is left to be shifted
        save(model, file)
        assert torch.equal(load(file)(images).logits, expected)


def test_a_model_of_timm_needs_no_create(file):
    model = shaken(timm.create_model("test_vit", num_classes=4))
    apply(model, "refiner+cb")
    save(model, file)
    assert_same(model, load(file))


def test_wrappers_are_taken_off(file):
    model = shaken(create("test_vit+cb_s"))
    save(torch.compile(model), file)
    assert_same(model, load(file))


def test_arguments_can_be_changed_if_the_weights_still_fit(file):
    save(create("test_vit+cb"), file)
    assert str(spec_of(load(file, drop_path_rate=0.3))) == "test_vit(drop_path_rate=0.3)+cb"
    with pytest.raises(UserError, match=r"do not fit its spec \(of another shape: head.bias, head.weight\)$"):
        load(file, num_classes=3)


def test_training_a_loaded_model_leaves_the_file_as_it_is(file):
    save(create("test_vit"), file)
    before = file.read_bytes()
    with torch.no_grad():
        for parameter in load(file).parameters():
            parameter.add_(1)
    assert file.read_bytes() == before


def test_changing_the_file_leaves_a_loaded_model_as_it_is(file):
    model = shaken(create("test_vit+cb"))
    save(model, file)
    loaded = load(file)
    with file.open("r+b") as there:  # in its place, as `cp` and `rsync --inplace` do
        there.write(bytes(file.stat().st_size))
    assert_same(model, loaded)


def test_the_weights_are_those_in_the_file(file):
    with pytest.raises(UserError, match="load takes no pretrained, for the weights are in the file"):
        load(file, pretrained=True)


def test_device(file):
    save(create("test_vit"), file)
    assert all(p.is_meta for p in load(file, device="meta").parameters())


def test_what_was_replaced_cannot_be_brought_back(file):
    save(shaken(create(f"{SMALL_SWIN}+dtm(variant=paper)")), file)
    with pytest.raises((UserError, NotImplementedError)):
        strip(load(file))


def test_the_metadata(file):
    model = create("test_vit+cb(layers=0-1)", num_classes=2, img_size=96)
    save(model, file, classes=["cat", "dog"], input_config={"mean": (0.1, 0.2, 0.3), "crop_pct": 1.0})
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt"
    info = json.loads(metadata["vitrefine"])
    assert info.pop("crc32") > 0
    assert info == {
        "spec": "test_vit(img_size=96,num_classes=2)+cb(block=mlp,layers=0-1,position=end)",
        "version": vitrefine.__version__,
        "input": {
            "input_size": [3, 96, 96],
            "mean": [0.1, 0.2, 0.3],
            "std": [0.5, 0.5, 0.5],
            "crop_pct": 1.0,
            "crop_mode": "center",
            "interpolation": "bicubic",
        },
        "classes": ["cat", "dog"],
    }


def test_a_default_that_changes_does_not_change_the_model(file, monkeypatch):
    model = shaken(create("test_vit+cb"))
    save(model, file)

    def cb(
        model,
        *,
        position: broadcast.Position = "front",
        block: broadcast.Block = "mlp",
        layers: Layers = "all",
    ):
        return broadcast.cb(model, position=position, block=block, layers=layers)

    cb.__module__ = broadcast.__name__
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.modification(summary="as a later version may have it")(cb)
    loaded = load(file)
    assert str(spec_of(loaded)) == "test_vit+cb(layers=upper,position=end)"
    assert torch.equal(outputs(loaded, inputs(model)), outputs(model, inputs(model)))


def test_input_and_classes_survive_loading_and_saving_again(file):
    config = timm.data.resolve_model_data_config(timm.create_model("test_vit")) | {"mean": (0.1, 0.2, 0.3)}
    save(create("test_vit", num_classes=2), file, classes=["cat", "dog"], input_config=config)
    loaded = load(file)
    assert timm.data.resolve_model_data_config(loaded) == config
    assert loaded.pretrained_cfg["label_names"] == ("cat", "dog")
    info = read(file)[1]
    save(loaded, file)
    assert read(file)[1] == info


def test_names_are_those_of_the_classes_that_a_model_has(file):
    model = create("test_vit", num_classes=2)
    for names in (["cat"], "cat"):
        with pytest.raises(UserError, match="cannot be those of a model of 2 classes"):
            save(model, file, classes=names)
    save(model, file, classes=["cat", "dog"])
    loaded = load(file)
    loaded.reset_classifier(3)
    save(loaded, file)
    assert "classes" not in read(file)[1]


def test_what_is_said_of_images_is_numbers_and_texts(file):
    with pytest.raises(UserError, match=r"numbers, texts and lists of these: .*Tensor"):
        save(create("test_vit"), file, input_config={"mean": torch.zeros(3)})
    assert not file.exists()


def test_the_size_of_a_model_that_does_not_show_it(file):
    save(create(SMALL_LIT), file)
    assert read(file)[1]["input"]["input_size"] == [3, 64, 64]


def test_other_tools_read_the_weights(file):
    model = shaken(create("test_vit+cb"))
    save(model, file)
    original = timm.create_model("test_vit", checkpoint_path=str(file))
    for name, weight in original.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_written_and_read(file):
    shared = torch.arange(12.0).view(3, 4)
    state = {
        "a": shared,
        "b": shared,
        "row": shared[1],
        "turned": shared.t(),
        "n": torch.tensor(3),
        "none": torch.empty(0),
    }
    write(file, state, {"spec": "test_vit", "note": "kept"})
    weights, info = read(file)
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) and weights[name].dtype == state[name].dtype for name in state)
    assert (info["spec"], info["note"], info["tied"]) == ("test_vit", "kept", {"b": "a"})


def test_tied_weights_stay_tied(file):
    model = shaken(create("test_vit+cb_s"))
    for block in model.blocks[1:]:
        block.attn.qkv.weight = model.blocks[0].attn.qkv.weight
    save(model, file)
    loaded = load(file)
    assert loaded.blocks[3].attn.qkv.weight is loaded.blocks[0].attn.qkv.weight
    assert_same(model, loaded)
    assert file.stat().st_size < 4 * sum(p.numel() for p in model.parameters()) + 20_000


# Refusals


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("model.pt", "model.pt has to end in .safetensors"),
        ("no/model.safetensors", "there is no folder .*no to write model.safetensors into; create it first"),
        ("folder.safetensors", "folder.safetensors is a folder; name a file in it"),
    ],
)
def test_where_nothing_can_be_saved(path, sentence, tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(UserError, match=sentence):
        save(create("test_vit"), tmp_path / path)


def test_what_cannot_be_saved(file):
    with torch.device("meta"):
        model = create("test_vit")
    with pytest.raises(UserError, match="cls_token is no tensor with values"):
        save(model, file)
    with pytest.raises(UserError, match=r"Linear was not made by vitrefine\.create"):
        save(nn.Linear(2, 2), file)
    with pytest.raises(UserError, match="an input configuration has no size; it has input_size, mean"):
        save(create("test_vit"), file, input_config={"size": 3})
    assert not file.exists()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    """What a good file holds."""
    file = tmp_path_factory.mktemp("good") / "model.safetensors"
    save(create("test_vit+cb_s"), file)
    return file.read_bytes()


def header(content: bytes) -> dict:
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def with_header(content: bytes, changed: dict) -> bytes:
    text = json.dumps(changed).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + struct.unpack("<Q", content[:8])[0] :]


def with_info(content: bytes, **changes: object) -> bytes:
    head = header(content)
    info = {**json.loads(head["__metadata__"][KEY]), **changes}
    head["__metadata__"][KEY] = json.dumps({k: v for k, v in info.items() if v is not None})
    return with_header(content, head)


def with_text(content: bytes, text: str) -> bytes:
    head = header(content)
    head["__metadata__"][KEY] = text
    return with_header(content, head)


def one_bit_flipped(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 4]) + content[-4:]


def in_whole_numbers(content: bytes) -> bytes:
    head = header(content)
    head["cls_token"]["dtype"] = "I32"
    return with_header(content, head)


CODE = "import os; os.system('echo ran > ran')"


class Trap:
    def __reduce__(self):
        return exec, (CODE,)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda c: b"", "is empty; copy it again"),
        (lambda c: b"hello", "is no safetensors file"),
        (lambda c: b"x" * 100, "is no safetensors file"),
        (lambda c: pickle.dumps(Trap()), "is a pickle, which may run any code when it is read"),
        (lambda c: c[:-1], "is damaged or cut short; copy it again"),
        (lambda c: c[:500], "is damaged or cut short; copy it again"),
        (lambda c: c[:9], "is damaged or cut short; copy it again"),
        (lambda c: c + b"more", "is damaged or cut short; copy it again"),
        (one_bit_flipped, "is damaged: its weights are not those that were written"),
        (lambda c: with_text(c, "{"), "is damaged: its metadata are no JSON"),
        (lambda c: with_text(c, "[" * 100_000), "is damaged: its metadata are no JSON"),
        (lambda c: with_text(c, "3"), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, spec=None), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, spec=3), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, tied={"a": "b"}), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, tied=["a"]), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, tied={"a": ["cls_token"]}), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, input=[1]), "is damaged: its metadata do not say"),
        (lambda c: with_info(c, spec="test_vit+cb("), "cannot be loaded: .* is never closed"),
        (lambda c: with_info(c, spec="no_such_vit"), "cannot be loaded: .*no_such_vit"),
        (lambda c: with_info(c, spec="test_vit+bc_9", version="9.0"), "no modification 'bc_9'.*9.0 wrote it, this is"),
        (lambda c: with_info(c, spec="test_vit+cb(speed=3)"), "cannot be loaded: .*cb has no option speed"),
        (
            lambda c: with_info(c, spec="test_vit+refiner"),
            r"too many: .*; missing: blocks.0.attn.refiner.* and [0-9]+ more\)$",
        ),
        (lambda c: with_info(c, spec="test_vit"), r"\(too many: blocks.0.mlp.broadcast.*, .* and [0-9]+ more\)$"),
        (lambda c: with_info(c, spec="test_vit(num_classes=3)+cb_s"), r"\(of another shape: head.bias, head.weight\)$"),
        (in_whole_numbers, r"\(of another type: cls_token\)$"),
        (
            lambda c: with_info(c, spec="test_vit(pretrained=true)+cb_s"),
            "its spec gives pretrained=True, which no saved",
        ),
        (lambda c: with_info(c, spec="test_vit(checkpoint_path=trap)+cb_s"), "its spec gives checkpoint_path"),
        (lambda c: with_info(c, spec="torchvision:fcn_resnet50(weights_backbone=DEFAULT)"), "gives weights_backbone"),
        (lambda c: with_info(c, spec="torchvision:fcn_resnet50"), "its weights do not fit its spec"),
        (lambda c: with_info(c, spec="hf_hub:a/b+cb_s"), "its spec names hf_hub:a/b without what that is"),
        (lambda c: with_info(c, spec="hf:a/b+cb_s"), "its spec names hf:a/b without what that is"),
        (lambda c: with_info(c, spec="hf:a/b(trust_remote_code=true)"), "its spec gives trust_remote_code"),
        (lambda c: with_info(c, spec="hf:a/b(attn_implementation=c/d)"), "its spec gives attn_implementation=c/d"),
    ],
)
def test_a_bad_file_gets_one_sentence(harm, sentence, good, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    file.write_bytes(harm(good))
    with pytest.raises(UserError, match=sentence) as error:
        load(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)
    assert not Path("ran").exists()


def test_a_configuration_names_no_code(file, tmp_path):
    model = of_transformers(VIT, "+cb", tmp_path / "original")
    save(model, file)
    config = read(file)[1]["config"]
    trap = {"attn_implementation": "owner/kernel", "auto_map": {"AutoModel": "code.Trap"}}
    file.write_bytes(with_info(file.read_bytes(), config=config | trap | {"inner": trap}))
    loaded = load(file)
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert not hasattr(loaded.config, "auto_map")
    assert loaded.config.inner == {}


def test_no_such_file_or_folder(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*nothing\.safetensors"):
        load(tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match=r"is a folder without a model\.safetensors"):
        load(tmp_path)


def test_weights_alone_are_refused(file):
    save_file(timm.create_model("test_vit").state_dict(), file)
    with pytest.raises(UserError, match=r"holds weights but no spec; build its model with vitrefine.create"):
        load(file)


# Failures in the middle of a write


def test_a_failed_rename_leaves_the_old_file(file, monkeypatch):
    save(create("test_vit"), file)
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="cannot be written: Input/output error"):
        save(create("test_vit+cb_s"), file)
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


def run(code: str, *args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300, **options)


def test_a_full_disk_leaves_the_old_file(file):
    save(create("test_vit"), file)
    before = file.read_bytes()
    code = """
import sys, resource, vitrefine
model = vitrefine.create("test_vit+cb_s")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    vitrefine.save(model, sys.argv[1])
except vitrefine.UserError as error:
    print(error)
"""
    said = run(code, str(file))
    assert said.stdout == f"{file} cannot be written: {os.strerror(errno.EFBIG)}\n", said.stderr
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


def test_a_killed_save_leaves_the_old_file(file):
    save(create("test_vit"), file)
    before = file.read_bytes()
    code = """
import os, signal, sys, vitrefine
model = vitrefine.create("test_vit+cb_s")
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
vitrefine.save(model, sys.argv[1])
"""
    assert run(code, str(file)).returncode == -signal.SIGKILL
    assert file.read_bytes() == before
    load(file)


def test_a_file_is_as_readable_as_others(file):
    other = file.with_name("other")
    other.write_text("")
    save(create("test_vit"), file)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


# Folders and the Hub


def test_a_folder_as_the_hub_has_it(tmp_path):
    model = shaken(create("test_vit(num_classes=2)+refiner+cb"))
    save_folder(model, tmp_path / "a" / "model", classes=["cat", "dog"])
    folder = tmp_path / "a" / "model"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["library_name"] == "vitrefine"
    assert parse(config["spec"]).base == spec_of(model).base
    assert config["input"]["input_size"] == [3, 160, 160]
    assert config["classes"] == ["cat", "dog"]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: vitrefine\n")
    assert "# test_vit(num_classes=2)+refiner+cb\n" in card
    assert str(report_of(model)) in card
    assert_same(model, load(folder))


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be made a folder: File exists"):
        save_folder(create("test_vit"), tmp_path / "file")


@pytest.mark.parametrize(
    "call",
    [
        "vitrefine.load('hf-hub:owner/name')",
        "vitrefine.load('hf_hub:owner/name@v1')",
        "vitrefine.push_to_hub(vitrefine.create('test_vit+cb'), 'owner/name', token='hf_x')",
    ],
)
def test_the_hub_out_of_reach_gets_one_sentence(call, tmp_path):
    code = f"""
import time, vitrefine
time.sleep = lambda _: None  # it tries again and again
try:
    {call}
except vitrefine.UserError as error:
    print(error)
"""
    said = run(code, env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)})
    (sentence,) = said.stdout.splitlines()
    assert sentence.startswith("owner/name cannot be reached on the Hugging Face Hub ("), said.stderr
    assert "check its name, the network and that you are logged in" in sentence


def test_what_goes_to_the_hub_comes_back(tmp_path, monkeypatch):
    import huggingface_hub

    hub = tmp_path / "hub"
    done = []

    def create_repo(self, repo_id, private, exist_ok):
        done.append((self.token, repo_id, private, exist_ok))
        return f"https://hub/{repo_id}"

    def upload_folder(self, repo_id, folder_path, ignore_patterns):
        (hub / repo_id).mkdir(parents=True, exist_ok=True)
        for path in Path(folder_path).iterdir():
            if path.name not in (ignore_patterns or ()):
                shutil.copy(path, hub / repo_id)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "file_exists", lambda self, repo_id, name: (hub / repo_id / name).exists()
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, revision: str(hub / name / file))
    model = shaken(create("test_vit+cb_s"))
    assert vitrefine.push_to_hub(model, "owner/name", token="t", private=True) == "https://hub/owner/name"
    assert done == [("t", "owner/name", True, True)]
    assert_same(model, load("hf-hub:owner/name"))
    card = hub / "owner" / "name" / "README.md"
    assert 'vitrefine.load("hf-hub:owner/name")' in card.read_text()
    card.write_text("mine")
    vitrefine.push_to_hub(create("test_vit+cb"), "owner/name")
    assert card.read_text() == "mine"
    assert str(spec_of(load("hf-hub:owner/name"))) == "test_vit+cb"
