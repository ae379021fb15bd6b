"""The pages: their links lead somewhere, their Python runs, and they know every option of the commands."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

import vitrefine
from vitrefine.cli.app import app
from vitrefine.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = {name: command.params for name, command in typer.main.get_command(app).commands.items()}  # type: ignore[attr-defined]
PAGE_OF = {"train": "training", "compare": "comparing", "evaluate": "evaluating", "diagnose": "diagnosing"}


def options(command):
    return {name for parameter in COMMANDS[command] for name in parameter.opts if name.startswith("--")}


def anchors(page):
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {*plain, *re.findall(r'id="([^"]+)"', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(("command", "page"), PAGE_OF.items())
def test_every_option_is_on_its_page(command, page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    missing = {name for name in options(command) - {"--help"} if not re.search(rf"{name}\b", text)}
    assert not missing


def command_lines():
    """Commands that pages show, those of other programs before them left out."""
    for page in PAGES:
        if page.name in ("claims.md", "zoo.md"):
            continue
        for found in re.findall(r"^(?:    |)(vitrefine [a-z]+ [^\n#]*)$", page.read_text(), flags=re.MULTILINE):
            yield pytest.param(re.sub(r"\s{3,}.*", "", found), id=f"{page.name}: {found[:60]}")


@pytest.mark.parametrize("line", command_lines())
def test_commands_that_are_shown_exist(line):
    _, command, *words = shlex.split(line)
    for name in command.split(","):
        assert name in COMMANDS
    assert {word for word in words if word.startswith("--")} <= options(command.rstrip(","))
    if "--data" in words and words[words.index("--data") + 1].startswith("wds:"):
        recipe = load_recipe(words[words.index("--recipe") + 1] if "--recipe" in words else "deit")
        assert recipe.augment.repeats == 1, "a stream cannot repeat images"


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


def test_python_of_data():
    names = {}
    exec(blocks_of("data.md")[0], names)
    assert names["batch"].images.shape == (64, 3, 32, 32)
    assert names["batch"].targets.shape == (64, 10)


def test_python_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    *blocks, weights = blocks_of("models.md")
    for block in blocks:
        exec(block.replace("800, 1344", "64, 96"), names)
    vitrefine.save(vitrefine.create("lit_ti"), "lit_ti.safetensors")
    exec(weights, names)
    assert names["model"](torch.randn(1, 3, 384, 384)).shape == (1, 1000)


def test_python_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    load, train = blocks_of("training.md")
    exec(train.replace("(depth=2)", "(depth=1,embed_dim=24,num_heads=3)"), names)
    exec(load.replace("runs/slow", "runs/short"), names)
    assert names["model"].pretrained_cfg["label_names"] == tuple("0123456789")
