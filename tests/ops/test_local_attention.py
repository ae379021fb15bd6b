"""DLA as plain attention over convolved values: the same function as `refined_attention` of a local kernel alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrefine.errors import UserError
from vitrefine.ops import Mix, refined_attention
from vitrefine.ops.local_attention import local_attention


def inputs(batch=2, heads=3, queries=13, keys=13, dim=8, size=3):
    q, k, v = (torch.randn(batch, heads, n, dim, dtype=torch.float64) for n in (queries, keys, keys))
    local = torch.randn(heads, size, size, dtype=torch.float64)
    return [t.requires_grad_() for t in (q, k, v, local)]


def masks(batch, heads, keys):
    """Every kind that is the same for all queries; rows of the last hide everything."""
    kept = torch.rand(batch, 1, 1, keys) > 0.4
    return {
        "none": None,
        "keys": kept[0, 0, 0],
        "keys of an image": kept,
        "keys of a head": torch.rand(batch, heads, 1, keys) > 0.4,
        "bias": torch.randn(batch, heads, 1, keys, dtype=torch.float64),
        "-inf": torch.zeros(kept.shape, dtype=torch.float64).masked_fill(~kept, -torch.inf),
        "-100": torch.zeros(kept.shape, dtype=torch.float64).masked_fill(~kept, -100),
        "everything": torch.zeros(batch, 1, 1, keys, dtype=torch.bool),
    }


def check(arguments, **options):
    q, k, v, local = arguments
    ours = local_attention(q, k, v, local, **options)
    exact = refined_attention(q, k, v, Mix(local=local), impl="reference", **options)
    assert (ours - exact).abs().max() < 1e-12
    upstream = torch.randn_like(ours)
    pairs = (torch.autograd.grad(y, arguments, upstream, allow_unused=True) for y in (ours, exact))
    for a, b in zip(*pairs, strict=True):
        assert (a - b).abs().max() < 1e-11


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 3, 5]),
    st.sampled_from(list(masks(1, 1, 1))), st.integers(0, 10**6),
)  # fmt: skip
def test_equals_refined_attention(batch, heads, queries, keys, size, mask, seed):
    torch.manual_seed(seed)
    check(inputs(batch, heads, queries, keys, size=size), attn_mask=masks(batch, heads, keys)[mask])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("mask", list(masks(1, 1, 1)))
def test_equals_refined_attention_over_an_image(size, mask):
    """One class token aside, which the kernel does not touch."""
    torch.manual_seed(0)
    check(inputs(size=size), grid=(3, 4), attn_mask=masks(2, 3, 13)[mask])


def test_scale_is_kept():
    torch.manual_seed(0)
    check(inputs(), scale=0.3)


def test_gradcheck():
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(local_attention, inputs(1, 2, 4, 5, 2))


def test_refuses_a_mask_that_differs_between_queries():
    q, k, v, local = inputs()
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    with pytest.raises(UserError, match="differs between queries"):
        local_attention(q, k, v, local, attn_mask=causal)


def test_refuses_more_kernels_than_heads():
    q, k, v, local = inputs()
    with pytest.raises(UserError, match="6 kernels for 3 heads"):
        local_attention(q, k, v, torch.cat([local, local]))


def test_compiles_whole():
    torch.manual_seed(0)
    arguments = inputs()
    compiled = torch.compile(local_attention, fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), local_attention(*arguments))
