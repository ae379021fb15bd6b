"""Deformable merging against torchvision's compiled operator, and on the paths that operator cannot take."""

import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import deform_conv2d

from vitrefine.ops import deformable_merge
from vitrefine.ops.deformable_merge import deform_map


def inputs(batch=2, height=8, width=6, channels=5, out=7, kernel_size=2, spread=1.5, dtype=torch.float32):
    size = (height // kernel_size, width // kernel_size)
    x = torch.randn(batch, height, width, channels, dtype=dtype, requires_grad=True)
    offset = (spread * torch.randn(batch, 2 * kernel_size**2, *size, dtype=dtype)).requires_grad_()
    weight = torch.randn(out, channels, kernel_size, kernel_size, dtype=dtype, requires_grad=True)
    bias = torch.randn(out, dtype=dtype, requires_grad=True)
    return x, offset, weight, bias


def torchvision_merge(x, offset, weight, bias):
    x = deform_conv2d(x.permute(0, 3, 1, 2), offset, weight, bias, stride=weight.shape[-1])
    return x.permute(0, 2, 3, 1)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3), st.integers(2, 9), st.integers(2, 9), st.sampled_from([2, 3]),
    st.sampled_from([0.0, 0.7, 4.0]), st.integers(0, 10**6),
)  # fmt: skip
def test_equals_torchvision(batch, height, width, kernel_size, spread, seed):
    """Zero spread matters: offsets start at zero, where bilinear sampling has a kink and the rule must pick a side."""
    torch.manual_seed(seed)
    height, width = max(height, kernel_size), max(width, kernel_size)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        arguments = inputs(batch, height, width, kernel_size=kernel_size, spread=spread, dtype=dtype)
        ours, theirs = deformable_merge(*arguments), torchvision_merge(*arguments)
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)
        upstream = torch.randn_like(ours)
        gradients = torch.autograd.grad(ours, arguments, upstream)
        for ours_grad, theirs_grad in zip(gradients, torch.autograd.grad(theirs, arguments, upstream), strict=True):
            atol = tolerance * max(theirs_grad.abs().max().item(), 1.0)
            torch.testing.assert_close(ours_grad, theirs_grad, rtol=0, atol=atol)


def test_a_place_that_is_no_number_is_not_taken_for_one_outside():
    x, offset, weight, bias = (t.detach() for t in inputs())
    offset[0, 3, 1, 2] = torch.inf
    outside = deformable_merge(x, offset, weight, bias)
    torch.testing.assert_close(outside, torchvision_merge(x, offset, weight, bias))
    for channel in (2, 3):
        offset[0, channel, 1, 2] = torch.nan
        merged = deformable_merge(x, offset, weight, bias)
        assert merged[0, 1, 2].isnan().all()
        merged[0, 1, 2] = outside[0, 1, 2]
        assert torch.equal(merged, outside)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(
        [(3, 2, 1, 1), (2, 2, 0, 1), (7, 4, 3, 1), ((3, 2), (2, 1), (1, 0), 1), (3, 2, 2, 2), (1, 2, 0, 1)]
    ),
    st.sampled_from([1, 2, 6]), st.integers(5, 11), st.integers(5, 11), st.sampled_from([0.0, 1.3]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_equals_torchvision_in_any_geometry(geometry, groups, height, width, spread, seed):
    """What a model merges with: 3×3 with stride 2 and padding, depth-wise, oblong, dilated."""
    torch.manual_seed(seed)
    kernel, stride, padding, dilation = geometry
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        x = torch.randn(2, height, width, 6, dtype=dtype, requires_grad=True)
        weight = torch.randn(12, 6 // groups, *kernel, dtype=dtype, requires_grad=True)
        bias = torch.randn(12, dtype=dtype, requires_grad=True)
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        plain = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, groups=groups, **options)
        taps = kernel[0] * kernel[1]
        offset = (spread * torch.randn(2, 2 * taps, *plain.shape[2:], dtype=dtype)).requires_grad_()
        ours = deformable_merge(x, offset, weight, bias, groups=groups, **options)
        theirs = deform_conv2d(x.permute(0, 3, 1, 2), offset, weight, bias, **options).permute(0, 2, 3, 1)
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)
        if not spread:
            torch.testing.assert_close(ours, plain.permute(0, 2, 3, 1), rtol=0, atol=tolerance * scale)
        upstream, arguments = torch.randn_like(ours), (x, offset, weight, bias)
        gradients = torch.autograd.grad(ours, arguments, upstream)
        for ours_grad, theirs_grad in zip(gradients, torch.autograd.grad(theirs, arguments, upstream), strict=True):
            atol = tolerance * max(theirs_grad.abs().max().item(), 1.0)
            torch.testing.assert_close(ours_grad, theirs_grad, rtol=0, atol=atol)


def test_a_deformed_map_is_what_the_regular_convolution_reads():
    x, offset, weight, bias = inputs(height=6, width=10, dtype=torch.float64)
    moved = deform_map(x, offset, 2)
    assert moved.shape == x.shape
    merged = F.conv2d(moved.permute(0, 3, 1, 2), weight, bias, stride=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(merged, deformable_merge(x, offset, weight, bias))
    assert deform_map(x, torch.zeros_like(offset), 2).equal(x)


@pytest.mark.parametrize("groups", [1, 4])
def test_no_image_at_all(groups):
    x, offset, weight = torch.randn(0, 4, 6, 4), torch.randn(0, 8, 2, 3), torch.randn(4, 4 // groups, 2, 2)
    assert deformable_merge(x, offset, weight, groups=groups).shape == (0, 2, 3, 4)


def test_gradcheck():
    torch.manual_seed(3)
    assert torch.autograd.gradcheck(deformable_merge, inputs(1, 4, 4, 2, 2, spread=0.6, dtype=torch.float64))


def test_bfloat16_follows_float32():
    arguments = [t.detach() for t in inputs(height=64, width=64)]
    exact = deformable_merge(*arguments)
    half = deformable_merge(arguments[0].bfloat16(), arguments[1], *(t.bfloat16() for t in arguments[2:]))
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 1e-2


def test_compiles_whole():
    arguments = inputs()
    compiled = torch.compile(deformable_merge, fullgraph=True)
    ours, eager = compiled(*arguments), deformable_merge(*arguments)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), arguments), torch.autograd.grad(eager.sum(), arguments), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Merge(torch.nn.Module):
    def forward(self, x, offset, weight, bias):
        return deformable_merge(x, offset, weight, bias)


def test_exports():
    arguments = tuple(t.detach() for t in inputs())
    program = torch.export.export(Merge(), arguments)
    torch.testing.assert_close(program.module()(*arguments), deformable_merge(*arguments))


def test_onnx_runs_elsewhere():
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    arguments = tuple(t.detach() for t in inputs())
    buffer = io.BytesIO()
    program = torch.onnx.export(Merge().eval(), arguments, dynamo=True, verbose=False)
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue())
    names = [i.name for i in session.get_inputs()]
    (output,) = session.run(None, {n: t.numpy() for n, t in zip(names, arguments, strict=True)})
    torch.testing.assert_close(torch.from_numpy(output), deformable_merge(*arguments), rtol=1e-4, atol=1e-4)
