"""The authors' outputs, if they lie beside the checkout."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"


@pytest.fixture
def golden():
    """Read a fixture: its tensors by name, its official state dict, its constructor arguments."""

    def read(name: str) -> SimpleNamespace:
        path = GOLDEN / f"{name}.safetensors"
        if not path.exists():
            pytest.skip(f"the authors' outputs ({path.name}) are not beside this checkout")
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            meta = json.loads(file.metadata()["meta"])
        take = "state_dict."
        state = {key.removeprefix(take): value for key, value in tensors.items() if key.startswith(take)}
        named = {key: value for key, value in tensors.items() if "." not in key}
        return SimpleNamespace(meta=meta, state=state, all=tensors, **named)

    return read


@pytest.fixture
def agrees():
    """Relative to the largest value: 1e-5 in float32, 1e-9 in float64."""

    def check(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> None:
        assert ours.shape == theirs.shape
        tolerance = tolerance or (1e-9 if ours.dtype == torch.float64 else 1e-5)
        error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert error < tolerance, f"relative error {error:.2e}"

    return check
