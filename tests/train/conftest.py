"""Small jobs, in this process or in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outcome = dict[str, Any]


@pytest.fixture(scope="session")
def stages() -> Callable[..., list[Outcome]]:
    """Do stages of training one after the other, as worker.py describes them; what became of each."""

    def run(*stages: dict[str, Any], cpu: bool = True) -> list[Outcome]:
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(stages, default=str)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": str(cpu).lower()}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        outcomes: list[Outcome] = json.loads(done.stdout.splitlines()[-1])
        assert "Traceback" not in done.stderr, done.stderr
        return outcomes

    return run


@pytest.fixture(scope="session")
def small_job() -> Callable[..., Any]:
    """A job of seconds on the digits."""
    from vitrefine.train.job import Job
    from vitrefine.train.recipe import load_recipe

    spec = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=3)"
    quick = str(Path(__file__).with_name("quick.yaml"))

    def make(folder: Path, *overrides: str, **options: Any) -> Job:
        given = {"spec": spec, "data": "digits", "recipe_name": quick} | options
        return Job(recipe=load_recipe(quick, overrides), folder=folder, overrides=overrides, **given)

    return make
