"""Streamed statistics are the eager ones, before and after refinement, in memory that is linear in tokens."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from vitrefine.diagnose import streamed
from vitrefine.diagnose.call import Call
from vitrefine.diagnose.grid import TokenGrid
from vitrefine.diagnose.measures import head_similarity, relative_distance, row_entropy
from vitrefine.diagnose.streamed import call_statistics, off_diagonal, refined_similarity, tiles
from vitrefine.diagnose.taps import refinement_of
from vitrefine.layers.refiner import Refiner
from vitrefine.ops.refined_attention import refined_maps


@pytest.fixture
def call() -> Call:
    torch.manual_seed(0)
    return Call(3 * torch.randn(3, 4, 10, 8), torch.randn(3, 4, 10, 8), scale=0.5)


@pytest.fixture(params=[37, 1 << 20])
def entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles of few entries and of all."""
    monkeypatch.setattr(streamed, "ENTRIES", request.param)
    return request.param


def test_tiles_cover_everything_once(call: Call, entries: int) -> None:
    seen = torch.zeros(3, 10)
    for images, rows in tiles(call):
        seen[images, rows] += 1
    assert (seen == 1).all()
    assert (len(tiles(call)) > 1) == (entries == 37)


@pytest.mark.parametrize("written", [False, True])
def test_streamed_is_eager(call: Call, entries: int, written: bool) -> None:
    places = TokenGrid(1, 3, 3).coordinates()
    eager = ((call.q.double() * 0.5) @ call.k.double().mT).softmax(dim=-1)  # type: ignore[union-attr]
    found = call_statistics(Call(written=eager.float()) if written else call, places)
    exact: dict[str, Tensor] = {
        "entropy": row_entropy(eager),
        "squares": eager.square().sum(dim=-1),
        "similarity": head_similarity(eager),
        "distance": relative_distance(eager, places),
    }
    for name, expected in exact.items():
        torch.testing.assert_close(getattr(found, name).double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_refined_rows_are_those_of_the_whole_map(call: Call, entries: int, kernel_size: int, masked: bool) -> None:
    refiner = Refiner(4, expansion=2, kernel_size=kernel_size)
    for parameter in refiner.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    mask = torch.rand(1, 1, 10, 10) > 0.3 if masked else None
    refined = Call(call.q, call.k, attn_mask=mask, scale=0.5, refinement=refinement_of(refiner.mix()))
    assert call.q is not None
    assert call.k is not None
    whole = refined_maps(call.q, call.k, refiner.mix(), attn_mask=mask, scale=0.5)
    torch.testing.assert_close(refined.refined_maps(), whole.detach())
    for images, rows in tiles(refined):
        torch.testing.assert_close(refined.refined_maps(images, rows), whole[images, :, rows].detach())
    torch.testing.assert_close(refined_similarity(refined), head_similarity(whole).detach(), rtol=1e-5, atol=1e-6)


def test_off_diagonal() -> None:
    matrix = torch.tensor([[[1.0, 0.2, 0.4], [0.2, 1.0, 0.6], [0.4, 0.6, 1.0]]])
    torch.testing.assert_close(off_diagonal(matrix), torch.tensor([[0.3, 0.4, 0.5]]))
    assert off_diagonal(torch.ones(2, 1, 1)).tolist() == [[1.0], [1.0]]


MEMORY = """
import resource, sys, torch
from vitrefine.diagnose.call import Call
from vitrefine.diagnose.streamed import call_statistics, refined_similarity
from vitrefine.diagnose.taps import refinement_of
from vitrefine.diagnose.grid import TokenGrid
from vitrefine.layers.refiner import Refiner

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def measure(side):
    tokens = side * side
    q, k = torch.randn(2, 1, 8, tokens, 32)
    call = Call(q, k, refinement=refinement_of(Refiner(8).mix()))
    call_statistics(call, TokenGrid(0, side, side).coordinates())
    refined_similarity(call)

torch.set_num_threads(1)
measure(16)  # what PyTorch itself takes at its first steps
before = peak()
measure(64)
print(peak() - before)
"""


def test_memory_is_far_below_that_of_a_map() -> None:
    """4,096 tokens: the maps of 8 heads take 512 MiB, in a tensor of which several are needed at a time."""
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300, check=True)
    assert int(result.stdout) < 400 * 2**20
