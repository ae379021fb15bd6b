"""Texts that name a run, something else that is there, a spec, or nothing at all."""

import json
from pathlib import Path

import pytest

from vitrefine.diagnose.named import run_of
from vitrefine.errors import UserError


def test_a_run_by_its_folder_and_by_its_model(tmp_path: Path) -> None:
    about = dict.fromkeys(("spec", "base_spec", "fingerprint", "recipe"), "x") | {"data": "digits", "seed": 0}
    (tmp_path / "run.json").write_text(json.dumps(about | {"status": "stopped"}))
    for text in (tmp_path, tmp_path / "model.safetensors"):
        found = run_of(str(text))
        assert found is not None
        assert (found.folder, found.data) == (tmp_path, "digits")


@pytest.mark.parametrize(
    "text",
    [
        "vit_tiny_patch16_224",
        "vit_tiny_patch16_224(depth=2)+cb",
        "vit_tiny_patch16_224(checkpoint_path=a/b.pth)",
        "hf:google/vit-base-patch16-224+cb",
        "hf-hub:owner/name",
        f"vit_tiny_patch16_224({','.join(['depth=2'] * 100)})",  # longer than a file's name may be
    ],
)
def test_specs_are_no_runs(text: str) -> None:
    assert run_of(text) is None


def test_what_is_there_and_no_run(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    file.touch()
    assert run_of(str(file)) is None
    assert run_of(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("runs/nothere", "folder runs/nothere"),
        ("./nothere", r"folder \./nothere"),
        ("runs/nothere+cb", r"folder runs/nothere\+cb"),
        ("nothere.safetensors", r"file nothere\.safetensors"),
        ("runs/nothere/model.safetensors", r"file runs/nothere/model\.safetensors"),
    ],
)
def test_paths_that_lead_nowhere(text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"there is no {what}; give "):
        run_of(text)
