"""The answer of a comparison in a terminal: no word is broken in two."""

import io

import numpy as np
from rich.console import Console

from vitrefine.cli.standings import print_standings
from vitrefine.report.results import Run, group
from vitrefine.train.job import Result

BASE = "vit_tiny_patch16_224"


def a_run(spec: str, right: int) -> Run:
    bits = np.arange(1000) < right
    result = Result(right / 10, 99.0, 0.3, 1000, 900.0, 512.0, 41.0, 20, 5_400_000, 360_000_000, "")
    known = {"folder": None, "fitted": spec, "data": "digits", "fingerprint": "f00d", "recipe_name": "digits"}
    return Run(spec=spec, seed=0, recipe="epochs: 20", status="finished", result=result, right=bits, **known)


def printed(terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, no_color=True)
    specs = {BASE: 700, f"{BASE}+cb": 705, f"{BASE}+cb_s": 703, f"{BASE}+refiner": 701, "lit_ti": 900}
    print_standings(console, group([a_run(spec, right) for spec, right in specs.items()]))
    return file.getvalue()


def test_a_terminal_gets_lines_and_a_file_the_whole_sentence() -> None:
    better = "lit_ti is better than vit_tiny_patch16_224 by 20.0 points"
    answer = f"{better}; +cb, +cb_s and +refiner cannot be told apart from {BASE}. One seed says so; others may not."
    told = printed(terminal=False)
    assert answer in told
    assert "among 4 comparisons without any effect, the chance that at least one excludes zero is up to 20" in told
    broken = printed(terminal=True).replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    head = broken[1 : next(i for i, line in enumerate(broken) if line.startswith("spec"))]
    assert len(head) == 3
    assert " ".join(" ".join(head).split()) == answer
