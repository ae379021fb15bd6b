"""The MLP with CB against numbers computed by the authors' class."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitrefine.layers.context_broadcast import ContextBroadcastMlp

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "cb_mlp.safetensors"


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden file cb_mlp.safetensors is not beside the repository")
@pytest.mark.parametrize(
    ("dtype", "key", "tolerance"), [(torch.float32, "output", 1e-5), (torch.float64, "output_f64", 1e-9)]
)
def test_outputs(dtype: torch.dtype, key: str, tolerance: float) -> None:
    golden = load_file(GOLDEN)
    state = {name.removeprefix("state_dict."): w for name, w in golden.items() if name.startswith("state_dict.")}
    mlp = ContextBroadcastMlp(16, 40)
    mlp.load_state_dict(state, strict=True)
    out = mlp.eval().to(dtype)(golden["input"].to(dtype))
    expected = golden[key]
    assert out.dtype == expected.dtype
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()
