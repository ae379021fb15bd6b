"""The merging kernels against the specification in float64, on the GPU or in Triton's interpreter.

The interpreter must be chosen before Triton is imported, and other tests may have imported it: without a GPU this file
therefore runs itself, at small sizes, in a process of its own.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_here import DEVICE, ON_GPU, RUN, TOLERANCE, on_gpu, runs_interpreter, runs_kernels

from vitrefine.errors import UserError
from vitrefine.ops.deformable_merge import deformable_merge

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")

if RUN:
    from vitrefine.ops.kernels.deformable_merge_op import deformable_merge_triton


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__)


def inputs(batch=2, height=6, width=8, channels=20, out=24, kernel=2, spread=1.0, dtype=torch.float32, size=None):
    size = (height // kernel, width // kernel) if size is None else size
    drawn = (
        torch.randn(batch, height, width, channels),
        spread * torch.randn(batch, 2 * kernel**2, *size),
        torch.randn(out, channels, kernel, kernel),
        torch.randn(out),
    )
    return [t.to(DEVICE, dtype).requires_grad_() for t in drawn]


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def check(arguments, **geometry):
    """Output and all gradients, relative to the specification in float64."""
    exact_arguments = [t.detach().double().requires_grad_() for t in arguments]
    ours, exact = deformable_merge_triton(*arguments, **geometry), deformable_merge(*exact_arguments, **geometry)
    assert ours.dtype == arguments[0].dtype
    tolerance = TOLERANCE[ours.dtype]
    assert relative_error(ours, exact) < tolerance
    upstream = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, arguments, upstream)
    exact_gradients = torch.autograd.grad(exact, exact_arguments, upstream.double())
    for argument, gradient, exact_gradient in zip(arguments, gradients, exact_gradients, strict=True):
        assert gradient.dtype == argument.dtype
        assert relative_error(gradient, exact_gradient) < tolerance
    return ours, gradients


@runs_kernels
@settings(max_examples=8 if not ON_GPU else 30, deadline=None)
@given(
    st.integers(1, 3), st.integers(2, 9), st.integers(2, 9), st.integers(1, 40), st.integers(1, 20),
    st.sampled_from([0.0, 0.7, 4.0]), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_follows_the_specification(batch, height, width, channels, out, spread, dtype, seed):
    torch.manual_seed(seed)
    check(inputs(batch, height, width, channels, out, spread=spread, dtype=dtype))


@runs_kernels
@pytest.mark.parametrize("stride", [2, (2, 1)])
def test_serves_windows_that_overlap(stride):
    down, across = stride if isinstance(stride, tuple) else (stride, stride)
    size = ((7 + 2 - 3) // down + 1, (9 + 2 - 3) // across + 1)
    check(inputs(height=7, width=9, kernel=3, size=size), stride=stride, padding=1)
    size = ((7 + 2 - 5) // down + 1, (9 + 2 - 5) // across + 1)
    check(inputs(height=7, width=9, kernel=3, size=size), stride=stride, padding=1, dilation=2)


@runs_kernels
def test_every_tap_at_one_place():
    """The longest list a pixel can have; and taps far outside, which reach nothing."""
    x, offset, weight, bias = inputs(spread=0)
    row, column = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    with torch.no_grad():
        for tap in range(4):
            offset[:, 2 * tap] = (2.3 - 2 * row - tap // 2).to(offset)
            offset[:, 2 * tap + 1] = (3.6 - 2 * column - tap % 2).to(offset)
        offset[1] = 1e30
    output, gradients = check([x, offset, weight, bias])
    torch.testing.assert_close(output[1], bias.expand_as(output[1]))
    assert not gradients[0][1].any()


@runs_kernels
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_no_number_stays_none(part):
    """A model that has gone astray must not look sound; its other tokens are as they were."""
    x, offset, weight, bias = inputs()
    sound = deformable_merge_triton(x, offset, weight, bias)
    with torch.no_grad():
        offset[1, part, 2, 3] = torch.nan
    astray = deformable_merge_triton(x, offset, weight, bias)
    assert astray.isnan().equal(deformable_merge(x, offset, weight, bias).isnan())
    assert astray[1, 2, 3].isnan().all()
    assert int(astray.isnan().sum()) == astray.shape[-1]
    assert astray[0].equal(sound[0])
    grad_x, grad_offset = torch.autograd.grad(astray[0].sum() + astray[1, 0].sum(), [x, offset])
    assert grad_x[0].isfinite().all()
    assert grad_offset[0].isfinite().all()


@runs_kernels
def test_same_bits_twice():
    arguments = inputs(batch=3, height=14, width=10, spread=2.0)
    upstream = torch.randn(3, 7, 5, 24, device=DEVICE)
    once, again = (torch.autograd.grad(deformable_merge_triton(*arguments), arguments, upstream) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(once, again, strict=True))


@runs_kernels
def test_takes_any_layout():
    x, offset, weight, bias = inputs()
    moved = x.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1).requires_grad_()
    last = offset.detach().to(memory_format=torch.channels_last).requires_grad_()
    still = offset.detach()[:, :, :1, :1].expand(-1, -1, 3, 4)
    for layout in ((moved, offset), (x, last), (x, still.requires_grad_())):
        check([*layout, weight, bias])
    assert deformable_merge_triton(x, offset, weight).shape == (2, 3, 4, 24)


@runs_kernels
def test_compiles_whole_and_exports():
    arguments = inputs()
    compiled = torch.compile(deformable_merge_triton, fullgraph=True)
    ours, eager = compiled(*arguments), deformable_merge_triton(*arguments)
    assert ours.equal(eager)
    upstream = torch.randn_like(ours)
    pairs = zip(*(torch.autograd.grad(y, arguments, upstream) for y in (ours, eager)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    class Merge(torch.nn.Module):
        def forward(self, *tensors):
            return deformable_merge_triton(*tensors)

    detached = tuple(t.detach() for t in arguments)
    assert torch.export.export(Merge(), detached).module()(*detached).equal(eager)


@runs_kernels
def test_operator_is_registered_soundly():
    arguments = inputs(batch=1, height=4, width=4, channels=3, out=5)
    torch.library.opcheck(torch.ops.vitrefine.deformable_merge.default, (*arguments, [2, 2, 0, 0, 1, 1]))


@runs_kernels
def test_autocast_merges_in_half_precision():
    arguments = inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        output = deformable_merge_triton(*arguments)
    assert output.dtype == torch.bfloat16
    assert relative_error(output, deformable_merge(*(t.detach().double() for t in arguments))) < 1e-2
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(output.sum(), arguments))


@runs_kernels
def test_refuses_what_it_cannot_do():
    x, offset, weight, bias = inputs()
    with pytest.raises(UserError, match="one type"):
        deformable_merge_triton(x.double(), offset, weight.double(), bias.double())
    with pytest.raises(UserError, match="groups"):
        deformable_merge_triton(x, offset, weight[:, :10], bias)
    with pytest.raises(UserError, match="4 taps"):
        deformable_merge_triton(x, offset[:, :6], weight, bias)


@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("channels", "size", "out"), [(96, 56, 192), (384, 14, 768), (64, 25, 128)])
def test_model_shapes(channels, size, out, dtype):
    check(inputs(4, size, size, channels, out, spread=0.8, dtype=dtype))
