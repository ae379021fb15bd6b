"""`vitrefine compare` and `vitrefine report` as a user runs them."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitrefine.cli import main

BASE = "vit_tiny_patch16_224(depth=1,embed_dim=24,img_size=32,num_heads=2,patch_size=8)"
QUICK = ("--set", "epochs=1", "--set", "batch=128", "--set", "schedule.warmup_epochs=0")
MAIN = (sys.executable, "-m", "vitrefine.cli")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *args], capture_output=True, text=True, timeout=600, check=False, cwd=cwd, env=ENVIRONMENT
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished comparison, one seed of two specs, and what the command said."""
    place = tmp_path_factory.mktemp("compare")
    return place / "out", run("compare", BASE, "+cb", *QUICK, "--seeds", "1", "--out", "out", cwd=place)


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / "out")
    return to / "out"


def test_all_at_once(compared: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, result = compared
    assert result.returncode == 0, result.stderr
    assert "run 2 of 2: +cb, seed 0, on cpu" in result.stderr
    headline, _, table = result.stdout.strip().partition("\n")
    assert headline.startswith("+cb ")
    assert "vit_tiny_patch16_224" in headline
    assert table.split()[:6] == ["spec", "accuracy", "%", "difference", "parameters", "MACs"]
    assert "the page is out/report.html" in result.stdout
    assert sorted(path.parent.name for path in out.glob("*/result.json"))[0] == "cb-s0"
    page = (out / "report.html").read_text()
    assert "Where they look" in page
    assert "Attention is not shown" not in page
    assert shlex.join(["vitrefine", "compare", BASE, "+cb", "--data", "digits"]) in page.replace("&#39;", "'")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_page_is_there_though_nothing_can_be_printed(
    compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    copy(compared[0], tmp_path)
    page = tmp_path / "out" / "report.html"
    for args in (["compare", BASE, "+cb", *QUICK, "--seeds", "1", "--out", "out", "--resume"], ["report", "out"]):
        page.unlink()
        with open("/dev/full", "w") as full:
            told = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
            done = subprocess.run([*MAIN, *args], check=False, cwd=tmp_path, env=ENVIRONMENT, **told)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert page.read_text().rstrip().endswith("</html>")


def test_the_same_folder_twice(compared: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = compared
    again = run("compare", BASE, "+cb", *QUICK, "--seeds", "1", "--out", "out", cwd=out.parent)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == (
        "vitrefine: out holds a comparison already; go on with it with --resume, or choose another --out\n"
    )
    other = run("compare", BASE, "+cb", "--seeds", "1", "--out", "out", "--resume", cwd=out.parent)
    assert other.returncode == 2
    assert "out holds another comparison: its recipe has other settings" in other.stderr


def test_more_seeds_later_and_a_run_that_fails(
    compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """What is finished stays, what fails takes nothing with it, and the page says so."""
    out = copy(compared[0], tmp_path)
    before = (out / "cb-s0" / "result.json").read_bytes()
    (out / "cb-s1").mkdir()
    foreign = json.loads((out / "cb-s0" / "run.json").read_text())
    (out / "cb-s1" / "run.json").write_text(json.dumps(foreign | {"seed": 5, "status": "stopped"}))
    shutil.copy(out / "cb-s0" / "recipe.yaml", out / "cb-s1")
    result = run("compare", BASE, "+cb", *QUICK, "--seeds", "3", "--out", "out", "--resume", cwd=tmp_path)
    assert result.returncode == 1
    assert "2 of 6 runs are finished already" in result.stderr
    assert "its seed is 5, not 1" in result.stderr
    assert "1 of 6 runs failed; try again with: vitrefine compare" in result.stdout
    assert (out / "cb-s0" / "result.json").read_bytes() == before
    assert (out / "cb-s2" / "result.json").is_file()
    page = (out / "report.html").read_text()
    assert "+cb, seed 1: failed: out/cb-s1 holds another run: its seed is 5, not 1" in page
    assert "2 of 7 runs have not finished; the figures are from the other 5." in page  # the foreign one is seen, too


def test_more_specs_later(tmp_path: Path) -> None:
    """They join the others, though nobody says in which folder."""
    args = ("compare", BASE, *QUICK, "--seeds", "1")
    assert run(*args, cwd=tmp_path).returncode == 0
    again = run(*args, "+cb", cwd=tmp_path)
    assert again.returncode == 2
    assert "go on with it with --resume" in again.stderr
    result = run(*args, "+cb", "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 of 2 runs are finished already" in result.stderr
    assert len(list(tmp_path.glob("runs/*"))) == 1


def test_two_at_a_time(compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """They come to the same bits as one after the other; one that fails takes nothing with it."""
    (tmp_path / "out" / "cb-s1").mkdir(parents=True)
    shutil.copy(compared[0] / "compare.json", tmp_path / "out")
    shutil.copytree(compared[0] / "cb-s0", tmp_path / "out" / "cb-s1", dirs_exist_ok=True)
    (tmp_path / "out" / "cb-s1" / "result.json").unlink()
    args = ("compare", BASE, "+cb", *QUICK, "--seeds", "2", "--jobs", "2", "--out", "out", "--resume")
    result = run(*args, cwd=tmp_path)
    assert result.returncode == 1
    assert "+cb, seed 1 failed: out/cb-s1 holds another run: its seed is 0, not 1" in result.stderr
    assert "1 of 4 runs failed; try again with: vitrefine compare" in result.stdout
    assert "--seeds 2 --jobs 2 --out out --resume" in result.stdout
    for path in compared[0].glob("*-s0/result.json"):
        same = json.loads((tmp_path / "out" / path.parent.name / "result.json").read_text())
        assert {"correct": same["correct"], "test_loss": same["test_loss"]}.items() <= json.loads(
            path.read_text()
        ).items()
        assert json.loads((tmp_path / "out" / path.parent.name / "run.json").read_text())["at_once"] == 2
    assert "some here shared it" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("jobs", [[], ["--jobs", "2"]])
def test_interrupted(jobs: list[str], tmp_path: Path) -> None:
    """Ctrl-C leaves a folder that goes on with the command it says."""
    args = ["compare", BASE, "+cb", *QUICK, "--set", "epochs=40", "--seeds", "1", *jobs, "--out", "out"]
    with subprocess.Popen(
        [*MAIN, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch 5/40" in line:
                process.send_signal(signal.SIGINT)
                break
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert said.strip() == f"stopped; go on with: {shlex.join(['vitrefine', *_spelt_out(args)])} --resume"
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["seeds"] == 1
    report = run("report", "out", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "was stopped, after" in report.stdout
    assert "+cb, seed 0: has not begun." in report.stdout or jobs


def _spelt_out(args: list[str]) -> list[str]:
    """The command in full, as it is kept."""
    at = args.index("--set")
    return [*args[:at], "--data", "digits", "--recipe", "digits", *args[at:]]


def test_report_of_single_runs(compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    out, _ = compared
    result = run("report", str(out / "cb-s0"), "--out", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "There is nothing here to compare it with." in " ".join(result.stdout.split())
    assert "the page is page.html" in result.stdout
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


def test_damaged_runs(compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """One among others is left out aloud, one that is named is refused, and a comparison goes on without it."""
    out = copy(compared[0], tmp_path)
    (out / "cb-s0" / "run.json").write_text('{"spec": "vit')
    fault = "is damaged: it is no JSON (EOF while parsing a string at line 1 column 13)"
    sentence = f"out/cb-s0/run.json {fault}; move this run elsewhere, or train it again"
    others = run("report", "out", cwd=tmp_path)
    assert (others.returncode, others.stderr) == (0, f"left out: {sentence}\n")
    assert "+cb, seed 0: is damaged." in others.stdout
    page = (out / "report.html").read_text()
    assert f"One run is damaged, and left out.</p>\n<ul>\n<li>O{sentence[1:]}.</li>" in page
    named = run("report", "out/cb-s0", cwd=tmp_path)
    assert (named.returncode, named.stdout, named.stderr) == (2, "", f"vitrefine: {sentence}\n")
    more = run("compare", BASE, "+cb", *QUICK, "--seeds", "2", "--out", "out", "--resume", cwd=tmp_path)
    assert more.returncode == 1
    assert f"+cb, seed 0 failed: {sentence}" in more.stderr
    assert "1 of 4 runs failed; try again with: vitrefine compare" in more.stdout
    assert (out / "cb-s1" / "result.json").is_file()


# In this process: what is imported once need not be imported for every mistake.
def refused(args: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on stderr when it refuses; nothing else may have happened."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["vitrefine", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("vitrefine: ")
    assert said.err.count("\n") == 1
    assert list(folder.iterdir()) == []
    return said.err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["+cb", BASE], "the first spec, +cb, has no model to continue"),
        ([BASE, "+cb", f"{BASE}+cb"], "is the same as +cb; leave one of them out"),
        ([BASE, "+cbb"], "did you mean cb?"),
        ([BASE, "+cb(layers=9)"], "+cb(layers=9): "),
        ([BASE, "vit_tny_patch16_224"], "did you mean vit_tiny_patch16_224"),
        ([BASE, "resnet10t+refiner"], "resnet10t+refiner: "),
        ([BASE, "vit_tiny_patch16_224(num_classes=3)"], "has 3 classes, but digits has 10"),
        ([BASE, "--set", "epoch=3"], "epochs"),
        ([BASE, "--set", "loss.distillation.teacher=no.safetensors"], "there is no file no.safetensors"),
        ([BASE, "--data", "digitz"], "there is no data set or folder 'digitz'"),
        ([BASE, "--recipe", "digit"], "there is no recipe 'digit'"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    args: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sentence in refused(["compare", *args], tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nowhere"], "there is no folder nowhere"),
        ([".", "--out", "none/page.html"], "--out takes a file in a folder that is there"),
        (["."], "there is no run in"),
    ],
)
def test_report_refuses(
    args: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sentence in refused(["report", *args], tmp_path, monkeypatch, capsys)


def test_from_the_same_weights(compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """All start from them; what starts from scratch is not compared with that."""
    start = str(compared[0] / "cb-s0")
    args = ("compare", BASE, "+cb_s", *QUICK, "--seeds", "1", "--out", "out")
    result = run(*args, "--weights", start, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"started from {start}" in result.stderr
    assert json.loads((tmp_path / "out" / "cb_s-s0" / "run.json").read_text())["weights"] == start
    scratch = run(*args, "--resume", cwd=tmp_path)
    assert scratch.returncode == 2
    assert f"its start is {start}, not from scratch" in scratch.stderr
    both = run("report", "out", str(compared[0]), "--out", "both.html", cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    assert "2 groups of runs, with different weights to start from." in (tmp_path / "both.html").read_text()
