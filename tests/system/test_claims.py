"""`vitrefine claims` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = (sys.executable, "-m", "vitrefine.cli")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
VIT = "vit_tiny_patch16_224(depth=1,embed_dim=24,img_size=32,num_heads=2,patch_size=8)"
QUICK = ("--set", "epochs=1", "--set", "batch=128", "--set", "schedule.warmup_epochs=0")
LEDGER = f"""\
title: A paper
paper: Somebody, Something (2020)
usual: {{data: digits, recipe: digits, seeds: 2}}
claims:
  table-1-cb:
    where: "Table 1: CB"
    claim: CB helps.
    test: {{first: "{VIT}", second: "{VIT}+cb", expect: higher}}
"""


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *args], capture_output=True, text=True, timeout=600, check=False, cwd=cwd, env=ENVIRONMENT
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "claims").mkdir(parents=True)
    (tmp_path / "docs" / "claims" / "paper.yaml").write_text(LEDGER)
    return tmp_path


def test_from_runs_to_the_page(place: Path) -> None:
    for spec in (VIT, f"{VIT}+cb"):
        out = f"runs/{'cb' if spec.endswith('cb') else 'plain'}"
        trained = run("train", spec, "--data", "digits", *QUICK, "--seed", "0", "--out", out, cwd=place)
        assert trained.returncode == 0, trained.stderr
    added = run("claims", "--add", "runs", cwd=place)
    assert (added.returncode, added.stderr) == (0, "")
    assert added.stdout.count("wrote docs/results/") == 2
    assert (
        "A paper: 1 row: 0 reproduced, 0 not reproduced, 1 inconclusive, 0 not run, 0 repeat others\n" in added.stdout
    )
    page = (place / "docs" / "claims.md").read_text()
    assert "**inconclusive**: 1 seed so far, of 2" in page
    for path in (place / "docs" / "results").glob("*.json"):
        raw = json.loads(path.read_text())
        assert f"results/{path.name}" in page
        assert raw["commands"][0] in page
        assert raw["runs"][0]["metrics"]["accuracy"] > 0
    assert run("claims", "--check", cwd=place).returncode == 0


def test_check(place: Path) -> None:
    missing = run("claims", "--check", cwd=place)
    assert missing.returncode == 1
    assert missing.stdout == "docs/claims.md is not current; make it anew with vitrefine claims --docs docs\n"
    assert not (place / "docs" / "claims.md").exists()
    assert run("claims", cwd=place).returncode == 0
    assert run("claims", "--check", cwd=place).stdout == "docs/claims.md is current\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--add",), "--add needs runs; name their folders, or a folder that holds them"),
        (("runs/a",), "what is to be done with runs/a? To put it into the raw results, say --add"),
        (("--add", "--check", "a"), "--add writes and --check does not; give one of them"),
        (("--docs", "nowhere"), "there is no folder nowhere; say with --docs where the documentation is"),
        (("--add", "nowhere"), "there is no folder nowhere; `vitrefine train` makes runs/ where it is called"),
    ],
)
def test_mistakes(place: Path, args: tuple[str, ...], sentence: str) -> None:
    found = run("claims", *args, cwd=place)
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"vitrefine: {sentence}\n")


def test_a_mistake_in_a_ledger(place: Path) -> None:
    path = place / "docs" / "claims" / "paper.yaml"
    path.write_text(LEDGER.replace("expect: higher", "expect: higher, metrix: entropy"))
    found = run("claims", cwd=place)
    assert found.returncode == 2
    assert found.stderr == (
        "vitrefine: docs/claims/paper.yaml, line 8: there is no setting test.metrix; did you mean test.metric?\n"
    )
