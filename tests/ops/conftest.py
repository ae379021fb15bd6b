"""What tests of kernels share."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def interpret() -> Callable[..., None]:
    """Run a file of tests in Triton's interpreter.

    It must be chosen before Triton is imported, and other tests may have imported it: hence a process of its own.
    """

    def run(file: str, *chosen: str) -> None:
        pytest.importorskip("triton")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen, file]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nothing wrote is NaN, so a result that was not written cannot pass."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
