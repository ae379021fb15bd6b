"""The authors' refinement with folded norms: against their modules, and the kernel against the specification."""

import pytest
import torch
from kernels_here import DEVICE, TOLERANCE, on_gpu, runs_interpreter, runs_kernels

from vitrefine.ops.official_refine import OfficialMix, official_refine


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__, "-k", "kernel")


def draw(heads=3, ratio=3, rows=7, columns=9, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = heads * ratio
    shapes = [(hidden, heads), (hidden,), (hidden, 3, 3), (hidden,), (heads, hidden), (heads,), (heads,)]
    weights = [2 * torch.randn(shape, device=DEVICE) for shape in shapes]
    if ratio == 1:
        weights[:2] = [None, None]
    return torch.rand(batch, heads, rows, columns, device=DEVICE).to(dtype), OfficialMix(*weights)


def check(maps, mix):
    exact = official_refine(
        maps.double(), OfficialMix(*(None if w is None else w.double() for w in mix)), impl="reference"
    )
    ours = official_refine(maps, mix, impl="triton")
    assert ours.dtype == maps.dtype
    assert ((ours.double() - exact).norm() / exact.norm()).item() < TOLERANCE[maps.dtype]


@runs_kernels
@pytest.mark.parametrize(("heads", "ratio", "rows", "columns"), [(3, 3, 7, 9), (4, 1, 5, 40), (12, 3, 6, 33)])
def test_kernel_follows_the_specification(heads, ratio, rows, columns):
    maps, mix = draw(heads, ratio, rows, columns)
    check(maps, mix)
    check(maps.mT.contiguous().mT, mix)


@runs_kernels
def test_kernel_compiles_whole():
    maps, mix = draw()
    compiled = torch.compile(lambda m, *w: official_refine(m, OfficialMix(*w), impl="triton"), fullgraph=True)
    assert compiled(maps, *mix).equal(official_refine(maps, mix, impl="triton"))


@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "ratio", "rows", "columns"), [(12, 3, 197, 197), (16, 3, 65, 577), (12, 1, 99, 50)])
def test_kernel_at_model_shapes(heads, ratio, rows, columns, dtype):
    check(*draw(heads, ratio, rows, columns, dtype=dtype))
