"""`vitrefine convert` as a user runs it: what it writes, what it says, and that a refusal writes nothing."""

import json
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import vitrefine
import vitrefine.models
from vitrefine.cli import main
from vitrefine.surgery.spec import parse

NAMES = [  # ours to the LIT-Ti authors'
    (r"^patch_embed\.", "patch_embed1."),
    (r"^stages\.3\.cls_token$", "cls_token"),
    (r"^stages\.(\d)\.pos_embed$", lambda m: f"pos_embed{int(m[1]) + 1}"),
    (r"^stages\.(\d)\.blocks\.", lambda m: f"block{int(m[1]) + 1}."),
    (r"^stages\.(\d)\.merge\.", lambda m: f"patch_embed{int(m[1]) + 1}."),
    (r"(embed\d)\.offset\.", r"\1.dconv.conv_offset."),
    (r"(embed\d)\.merge\.", r"\1.dconv."),
    (r"(embed[234])\.norm\.", r"\1.norm_layer."),
]


def official_lit_ti(**kwargs):
    """An official checkpoint of the right shapes and next to no size: every weight is one number, repeated."""
    with torch.device("meta"):
        state = timm.create_model("lit_ti", **kwargs).state_dict()
    official = {}
    for i, (name, tensor) in enumerate(state.items()):
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        official[name] = torch.tensor(i).to(tensor.dtype).expand(tensor.shape)
    return official


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": official_lit_ti()}, "lit_ti.pth")
    return tmp_path


@pytest.fixture
def complaint(folder, monkeypatch, capsys):
    """Run the command in this process; it has to refuse with one sentence, and to leave the folder as it was."""

    def run(*args: str) -> str:
        before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        monkeypatch.setattr(sys, "argv", ["vitrefine", "convert", *args])
        with pytest.raises(SystemExit) as finished:
            main()
        assert finished.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert re.fullmatch(r"vitrefine: [^\n]+\n", said.err)
        assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
        return said.err

    return run


def run(*args: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitrefine.cli", "convert", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def test_convert(folder):
    torch.save({"model": official_lit_ti(img_size=256, num_classes=10)}, "small.pth")
    result = run("small.pth", "--from", "lit", "--out", "lit_ti.safetensors")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["model", "arguments", "parameters", "written"]
    model = timm.create_model("lit_ti", img_size=256, num_classes=10)
    params = sum(parameter.numel() for parameter in model.parameters())
    for part in ("lit_ti", "img_size=256, num_classes=10", f"{params:,}", "lit_ti.safetensors"):
        assert part in result.stdout

    with safe_open("lit_ti.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"format", "vitrefine"}
    assert metadata["format"] == "pt"
    about = json.loads(metadata["vitrefine"])
    assert about.keys() == {"spec", "version", "input", "crc32"}
    assert about["version"] == vitrefine.__version__
    assert about["input"] == {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "crop_pct": 0.9,
        "input_size": [3, 256, 256],
        "interpolation": "bicubic",
    }
    spec = parse(about["spec"])
    assert (str(spec), spec.model) == ("lit_ti(img_size=256,num_classes=10)", "lit_ti")
    rebuilt = timm.create_model(spec.model, **spec.base.args)
    rebuilt.load_state_dict(load_file("lit_ti.safetensors"), strict=True)
    for i, (name, tensor) in enumerate(rebuilt.state_dict().items()):
        assert tensor.eq(i).all(), name
    assert Path("lit_ti.safetensors").stat().st_mode & 0o777 == Path("small.pth").stat().st_mode & 0o777
    assert {path.name for path in folder.iterdir()} == {"lit_ti.pth", "small.pth", "lit_ti.safetensors"}


def test_help_has_examples():
    result = run("--help")
    assert result.returncode == 0
    assert "vitrefine convert lit_ti.pth --from lit --out lit_ti.safetensors" in result.stdout


def test_an_existing_file_is_replaced_only_by_force(folder, complaint, monkeypatch, capsys):
    out = folder / "out.safetensors"
    out.write_text("precious")
    assert "is there already; add --force" in complaint("lit_ti.pth", "--from", "lit", "--out", out.name)
    monkeypatch.setattr(sys, "argv", ["vitrefine", "convert", "lit_ti.pth", "--from=lit", f"--out={out}", "--force"])
    with pytest.raises(SystemExit) as finished:
        main()
    assert not finished.value.code
    assert "19,886,272" in capsys.readouterr().out
    assert load_file(out)["head.weight"].shape == (1000, 512)


def test_a_full_disk_destroys_nothing(folder):
    (folder / "out.safetensors").write_text("precious")
    before = {path.name for path in folder.iterdir()}

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    result = run("lit_ti.pth", "--from", "lit", "--out", "out.safetensors", "--force", preexec_fn=small_files_only)
    assert result.returncode == 2
    assert result.stderr == "vitrefine: out.safetensors cannot be written: File too large\n"
    assert (folder / "out.safetensors").read_text() == "precious"
    assert {path.name for path in folder.iterdir()} == before


def test_the_output_is_checked_before_any_work(folder, complaint):
    (folder / "folder.safetensors").mkdir()
    args = ("lit_ti.pth", "--from", "lit", "--out")
    assert "has to end in .safetensors" in complaint(*args, "out.pth")
    assert "is a folder; name a file in it" in complaint(*args, "folder.safetensors", "--force")
    assert "there is no folder nowhere" in complaint(*args, "nowhere/out.safetensors")


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("marker"),)


def write_bad_files(folder):
    whole = (folder / "lit_ti.pth").read_bytes()
    good = official_lit_ti()
    (folder / "text.pth").write_text("these are no weights\n" * 20)
    (folder / "page.pth").write_text("<!DOCTYPE html><html><body>404: Not Found</body></html>")
    (folder / "empty.pth").write_bytes(b"")
    (folder / "cut.pth").write_bytes(whole[: len(whole) // 2])
    torch.save({"model": good, "note": Malicious()}, folder / "code.pth")
    (folder / "code.pkl").write_bytes(pickle.dumps(Malicious()))
    torch.save({**good, "more.weight": torch.zeros(2)}, folder / "more.pth")
    torch.save({name: tensor for name, tensor in good.items() if name != "norm.bias"}, folder / "fewer.pth")
    torch.save({**good, "norm.bias": torch.zeros(3)}, folder / "misshapen.pth")
    (folder / "directory.pth").mkdir()


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("missing.pth", "lit", "there is no file missing.pth"),
        ("directory.pth", "lit", "directory.pth is a folder"),
        ("text.pth", "lit", "text.pth is no PyTorch checkpoint"),
        ("page.pth", "refiner", "page.pth is no PyTorch checkpoint"),
        ("empty.pth", "lit", "empty.pth is no PyTorch checkpoint"),
        ("cut.pth", "lit", "cut.pth is no PyTorch checkpoint, or only a part of one; download it again"),
        ("code.pth", "lit", "may run code, so it was not loaded"),
        ("code.pkl", "lit", "code.pkl is no PyTorch checkpoint"),
        ("more.pth", "lit", "more.pth has weights left over as lit_ti: more.weight"),
        ("fewer.pth", "lit", "fewer.pth lacks weights as lit_ti: norm.bias"),
        ("misshapen.pth", "lit", "misshapen.pth has misshapen weights as lit_ti: norm.bias"),
        ("lit_ti.pth", "refiner", "is a checkpoint of lit, not of refiner; say --from lit"),
        ("lit_ti.pth", "swin", "--from swin is unknown; choose refiner or lit"),
    ],
)
def test_bad_input(folder, complaint, name, source, sentence):
    write_bad_files(folder)
    assert sentence in complaint(name, "--from", source, "--out", "out.safetensors")
    assert not (folder / "out.safetensors").exists()
    assert not (folder / "marker").exists()
