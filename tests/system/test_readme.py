"""The README's Python runs as it stands, but for the weights it would download."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec("import timm, vitrefine", names)
    exec(block.replace("pretrained=True", "pretrained=False"), names)


def test_there_are_blocks():
    assert len(BLOCKS) >= 3
