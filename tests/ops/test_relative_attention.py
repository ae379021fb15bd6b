"""Relative attention: the specification against the layer's bias, the kernels against the specification in float64.

Without a GPU the kernels run in Triton's interpreter, in a process of their own (see test_deformable_merge_triton). The
interpreter cannot multiply bfloat16.
"""

import pytest
import torch
import torch.nn.functional as F
from kernels_here import DEVICE, TOLERANCE, on_gpu, relative_error, runs_interpreter, runs_kernels

from vitrefine.errors import UserError
from vitrefine.layers.position import RelativePositionBias
from vitrefine.ops.relative_attention import relative_attention, spread_table

pytestmark = pytest.mark.usefixtures("poisoned")


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__, "-k", "kernel")


def inputs(batch=2, heads=2, grid=(3, 5), dim=16, dtype=torch.float32, device=DEVICE):
    """q, k and v as a layer hands them over, parts of one projection; and a table."""
    projected = torch.randn(batch, grid[0] * grid[1], 3, heads, dim).to(device, dtype).permute(2, 0, 3, 1, 4)
    table = torch.randn(heads, 2 * grid[0] - 1, 2 * grid[1] - 1, device=device)
    return [*(part.detach().requires_grad_() for part in projected), table.requires_grad_()]


def check(arguments, grid, **options):
    exact_arguments = [t.detach().double().requires_grad_() for t in arguments]
    ours = relative_attention(*arguments, grid, impl="triton", **options)
    exact = relative_attention(*exact_arguments, grid, impl="reference", **options)
    tolerance = TOLERANCE[ours.dtype]
    assert relative_error(ours, exact) < tolerance
    upstream = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, arguments, upstream)
    exact_gradients = torch.autograd.grad(exact, exact_arguments, upstream.double())
    for argument, gradient, exact_gradient in zip(arguments, gradients, exact_gradients, strict=True):
        assert gradient.dtype == argument.dtype
        assert relative_error(gradient, exact_gradient) < tolerance


def test_specification_is_the_layers_bias():
    position = RelativePositionBias(3, (4, 6), dtype=torch.float64)
    table = position.table.T.unflatten(1, (7, 11))
    assert spread_table(table, (4, 6)).equal(position((4, 6)))
    q, k, v = (torch.randn(2, 3, 24, 8, dtype=torch.float64) for _ in range(3))
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=position((4, 6))[None])
    torch.testing.assert_close(relative_attention(q, k, v, table, (4, 6), impl="reference"), exact)


def test_bad_input_is_named():
    arguments = inputs(device="cpu")
    with pytest.raises(UserError, match="no implementation 'fast'"):
        relative_attention(*arguments, (3, 5), impl="fast")
    with pytest.raises(UserError, match="5×3"):
        relative_attention(*arguments, (5, 3))


def test_exports_for_batches_of_any_size():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, table):
            return relative_attention(q, k, v, table, (3, 5))

    any_size = {0: torch.export.Dim("batch", min=1, max=1 << 20)}
    program = torch.export.export(
        Attention(), tuple(inputs(device="cpu")), dynamic_shapes=(any_size, any_size, any_size, None)
    ).module()
    others = inputs(batch=5, device="cpu")
    torch.testing.assert_close(program(*others), relative_attention(*others, (3, 5)))


@runs_kernels
@pytest.mark.parametrize(
    ("grid", "dim", "dtype"),
    [
        ((3, 5), 16, torch.float32),
        ((5, 7), 20, torch.float16),
        ((1, 9), 16, torch.float32),
        ((9, 1), 32, torch.float32),
        ((3, 40), 16, torch.float32),  # rows wider than a tile; runs of eight biases
        ((4, 12), 24, torch.float32),  # runs of four
    ],
)
def test_kernel_follows_the_specification(grid, dim, dtype):
    check(inputs(grid=grid, dim=dim, dtype=dtype, batch=1 if grid == (3, 40) else 2), grid)


@runs_kernels
def test_kernel_sums_over_rows_where_pairs_are_too_many(monkeypatch):
    from vitrefine.ops.kernels import relative_attention_grad_table as kernels

    monkeypatch.setattr(kernels, "MOST_PAIRS", 0)
    check(inputs(grid=(4, 5)), (4, 5))


@runs_kernels
def test_kernel_takes_a_scale_and_a_fixed_table():
    arguments, grid = inputs(), (3, 5)
    check(arguments, grid, scale=0.7)
    fixed = [*arguments[:3], arguments[3].detach()]
    ours, exact = (relative_attention(*fixed, grid, impl=impl).sum() for impl in ("triton", "reference"))
    pairs = zip(torch.autograd.grad(ours, fixed[:3]), torch.autograd.grad(exact, fixed[:3]), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@runs_kernels
def test_kernel_gives_the_same_bits_twice():
    arguments, grid = inputs(), (3, 5)
    runs = []
    for _ in range(2):
        out = relative_attention(*arguments, grid, impl="triton")
        runs.append([out, *torch.autograd.grad(out.square().sum(), arguments)])
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


@runs_kernels
def test_kernel_compiles_whole_and_exports():
    arguments, grid = inputs(batch=1), (3, 5)

    def attend(*tensors):
        return relative_attention(*tensors, grid, impl="triton")

    ours, eager = torch.compile(attend, fullgraph=True)(*arguments), attend(*arguments)
    torch.testing.assert_close(ours, eager)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), arguments) for y in (ours, eager)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)

    class Attend(torch.nn.Module):
        def forward(self, *tensors):
            return attend(*tensors)

    detached = tuple(t.detach() for t in arguments)
    torch.testing.assert_close(torch.export.export(Attend(), detached).module()(*detached), eager)


@runs_kernels
def test_kernel_operator_is_registered_soundly():
    import vitrefine.ops.kernels.relative_attention_op  # noqa: F401  registers the operator

    torch.library.opcheck(torch.ops.vitrefine.relative_attention.default, (*inputs(batch=1, grid=(2, 3)), 3, 0.25))


@runs_kernels
def test_kernel_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="at most 128 channels"):
        relative_attention(*inputs(dim=160), (3, 5), impl="triton")
    with pytest.raises(UserError, match="float64"):
        relative_attention(*(t.double() for t in inputs()), (3, 5), impl="triton")


@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("grid", "dim"), [((14, 14), 32), ((25, 42), 32), ((20, 37), 64), ((9, 13), 128)])
def test_kernel_at_model_shapes(grid, dim, dtype):
    check(inputs(heads=3, grid=grid, dim=dim, dtype=dtype), grid)
