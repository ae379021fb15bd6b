"""Whole maps times values: the kernels against plain products in float64, forward and backward.

Without a GPU the kernels run in Triton's interpreter, in a process of their own (see test_deformable_merge_triton).
"""

import pytest
import torch
from kernels_here import DEVICE, TOLERANCE, on_gpu, relative_error, runs_interpreter, runs_kernels

from vitrefine.ops.aligned_maps import empty_maps, has_gaps
from vitrefine.ops.refined_attention import aggregate

pytestmark = pytest.mark.usefixtures("poisoned")


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__, "-k", "kernel")


def inputs(batch=2, heads=3, queries=21, keys=21, dim=16, dtype=torch.float32):
    """Maps with gaps that hold NaN, and values as a layer hands them over."""
    maps = empty_maps(torch.empty(0, device=DEVICE, dtype=dtype), batch, heads, queries, keys)
    maps.copy_(torch.randn(maps.shape))
    v = torch.randn(batch, keys, heads, dim).to(DEVICE, dtype).transpose(1, 2)
    return maps.requires_grad_(), v.requires_grad_()


def check(maps, v):
    from vitrefine.ops.kernels.aggregate_maps_op import aggregate_maps_triton

    exact_arguments = [t.detach().double().requires_grad_() for t in (maps, v)]
    ours, exact = aggregate_maps_triton(maps, v), exact_arguments[0] @ exact_arguments[1]
    assert ours.transpose(1, 2).is_contiguous()
    assert relative_error(ours, exact) < TOLERANCE[maps.dtype]
    upstream = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, (maps, v), upstream)
    exact_gradients = torch.autograd.grad(exact, exact_arguments, upstream.double())
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert relative_error(gradient, exact_gradient) < TOLERANCE[maps.dtype]
    return gradients


def test_rows_with_gaps_are_told_from_others():
    like = torch.empty(0)
    assert has_gaps(empty_maps(like, 1, 2, 5, 21))
    assert not has_gaps(empty_maps(like, 1, 2, 5, 32))  # whole rows need none
    assert not has_gaps(like.new_empty(1, 2, 5, 21))
    assert not has_gaps(like.new_empty(1, 2, 21, 32).mT)
    assert not has_gaps(like.new_empty(1, 2, 5, 32)[..., :5])  # a part of something wider


@runs_kernels
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "dtype"),
    [(21, 21, 16, torch.float32), (70, 67, 20, torch.float16), (1, 130, 32, torch.float32), (65, 3, 48, torch.float16)],
)
def test_kernel_follows_plain_products(queries, keys, dim, dtype):
    grad_maps, _ = check(*inputs(queries=queries, keys=keys, dim=dim, dtype=dtype))
    assert has_gaps(grad_maps)  # so that the kernels that it goes to read whole vectors


@runs_kernels
def test_kernel_reads_maps_of_any_rows():
    maps, v = inputs(keys=32)
    check(maps.detach().contiguous().requires_grad_(), v)


@runs_kernels
def test_kernel_gives_the_same_bits_twice():
    from vitrefine.ops.kernels.aggregate_maps_op import aggregate_maps_triton

    maps, v = inputs(queries=70, keys=67)
    out = [aggregate_maps_triton(maps, v) for _ in range(2)]
    assert out[0].equal(out[1])
    first, second = (torch.autograd.grad(o, (maps, v), out[0].detach()) for o in out)
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


@runs_kernels
def test_kernel_is_a_proper_operator():
    from vitrefine.ops.kernels import aggregate_maps_op

    torch.library.opcheck(aggregate_maps_op._forward, inputs(dtype=torch.float16))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_maps_of_kernels_are_aggregated_by_one(dtype):
    maps, v = inputs(queries=197, keys=197, dim=32, heads=12, dtype=dtype)
    check(maps, v)
    assert aggregate(maps, v).transpose(1, 2).is_contiguous()  # which a plain product is not
    assert torch.compile(aggregate, fullgraph=True, dynamic=False)(maps, v).equal(aggregate(maps, v))
