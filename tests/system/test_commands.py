"""The commands as a user runs them: exit codes, sentences, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vitrefine
from vitrefine.cli import main

MAIN = (sys.executable, "-m", "vitrefine.cli")


def run(*args: str, python: tuple[str, ...] = ("-m", "vitrefine.cli")) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *python, *args], capture_output=True, text=True, timeout=300, check=False)


def complaint(*args: str) -> str:
    """What the command says on stderr when it refuses."""
    result = run(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_help_imports_neither_torch_nor_timm() -> None:
    for args in (["--help"], ["info", "--help"], ["models", "--help"]):
        result = run(*args, python=("-X", "importtime", "-m", "vitrefine.cli"))
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert result.returncode == 0
        assert "typer" in imported
        assert not imported & {"torch", "timm", "torchvision", "numpy", "transformers"}


def test_help_has_examples() -> None:
    assert "models" in run("--help").stdout
    assert "vitrefine info vit_small_patch16_224\n" in _unpadded(run("info", "--help").stdout)
    assert "vitrefine models --papers\n" in _unpadded(run("models", "--help").stdout)


def _unpadded(text: str) -> str:
    return "".join(line.strip() + "\n" for line in text.splitlines())


def test_version() -> None:
    assert run("--version").stdout == f"vitrefine {vitrefine.__version__}\n"


def test_entry_point() -> None:
    """The console script calls `vitrefine.cli:main`."""
    assert run("--version", python=("-c", "from vitrefine.cli import main; main()")).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["zoo"], ["zoo", "--json"]])
def test_a_full_disk(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MAIN, *args], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr == "vitrefine: the output: No space left on device; see to that, and run this again\n"


def test_signs_that_cannot_be_written() -> None:
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*MAIN, "zoo"], capture_output=True, text=True, timeout=300, check=False, env=plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert "swin_transformer" in done.stdout


def test_ctrl_c_before_the_command_begins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrefine.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "vitrefine: interrupted\n")


@pytest.mark.parametrize("args", [["inf"], ["info"], ["info", "resnet18", "--sise", "64"]])
def test_usage_errors(args: list[str]) -> None:
    assert "Usage: vitrefine" in complaint(*args)


def test_info_in_json() -> None:
    result = run("info", "deit_small_patch16_224", "--json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert (found["spec"], found["size"]) == ("deit_small_patch16_224", [224, 224])
    assert (found["params"], round(found["macs"] / 1e9, 1)) == (22_050_664, 4.6)
    assert sum(stage["macs"] for stage in found["stages"]) == found["macs"]
    assert found["activations"] > 0


def test_info_as_a_table() -> None:
    result = run("info", "vit_tiny_patch16_224(img_size=[32,64],patch_size=4)")
    assert result.returncode == 0
    assert "vit_tiny_patch16_224(img_size=[32,64],patch_size=4) at 32x64" in result.stdout
    assert "blocks.11" in result.stdout
    assert "papers print them as FLOPs" in " ".join(result.stdout.split())


def test_info_complains() -> None:
    assert complaint("info", "resnet18", "--size", "big").startswith("vitrefine: --size big is no size")
    unknown = complaint("info", "vit_smal_patch16_224")
    assert unknown.startswith("vitrefine: there is no model 'vit_smal_patch16_224'; did you mean vit_small_patch16_224")
    assert unknown.count("\n") == 1
    wrong = complaint("info", "vit_tiny_patch16_224", "--size", "225")
    assert wrong == "vitrefine: vit_tiny_patch16_224 cannot take 225x225; nearest sizes it can: 224, 240\n"


def test_models() -> None:
    result = run("models", "lit_*", "--json")
    assert result.returncode == 0
    rows = {row["model"]: row for row in json.loads(result.stdout)}
    assert {"lit_ti", "lit_s", "lit_m", "lit_b"} <= rows.keys()
    assert rows["lit_ti"]["params"] == 19_886_272
    assert rows["lit_ti"]["description"].startswith("LIT-Ti")
    assert "vit_small_patch16_224" not in rows
    assert "lit_ti" in run("models", "lit_ti").stdout


def test_models_complain() -> None:
    assert complaint("models", "no_such_model").startswith("vitrefine: no model of this package is named like")


def test_papers() -> None:
    result = run("models", "--papers", "refined_vit_s")
    assert result.returncode == 0
    assert "Refiner Table 7" in result.stdout
    assert "6.74G¹" in result.stdout
    assert "¹ no one configuration" in result.stdout
    rows = json.loads(run("models", "--papers", "lit_ti", "--json").stdout)
    assert all(row["params_agree"] and row["macs_agree"] for row in rows)
