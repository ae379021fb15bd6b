"""Refined attention against plain loops, its own identities, and autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrefine.errors import UserError
from vitrefine.ops.refined_attention import (
    Mix,
    attention_maps,
    refine_maps,
    refined_attention,
    refined_attention_and_maps,
    refined_maps,
)


def make_mix(heads, ratio, kernel_size, reduction, dtype=torch.float64):
    hidden = heads * (ratio or 1)
    return Mix(
        torch.randn(hidden, heads, dtype=dtype) if ratio else None,
        torch.randn(hidden, kernel_size, kernel_size, dtype=dtype) if kernel_size > 1 else None,
        torch.randn(heads, hidden, dtype=dtype) if ratio and reduction else None,
    )


def naive_refined(maps, mix, grid=None):
    """The definition, a sum at a time."""
    batch, heads, rows, columns = maps.shape
    expand = torch.eye(heads, dtype=maps.dtype) if mix.expand is None else mix.expand
    hidden = expand.shape[0]
    reduce = torch.eye(hidden, dtype=maps.dtype) if mix.reduce is None else mix.reduce
    expanded = torch.zeros(batch, hidden, rows, columns, dtype=maps.dtype)
    for m in range(hidden):
        for h in range(heads):
            expanded[:, m] += expand[m, h] * maps[:, h]
    local = expanded
    if mix.local is not None:
        local = torch.zeros_like(expanded)
        size = mix.local.shape[-1]
        aside = 0 if grid is None else columns - grid[0] * grid[1]
        local[..., :aside] = expanded[..., :aside]
        for i in range(rows):
            for j in range(aside, columns):
                for a in range(size):
                    for b in range(size):
                        da, db = a - (size - 1) // 2, b - (size - 1) // 2
                        if grid is None:
                            i2, j2 = i + da, j + db
                            inside = 0 <= i2 < rows and 0 <= j2 < columns
                        else:
                            y, x = divmod(j - aside, grid[1])
                            i2, j2 = i, aside + (y + da) * grid[1] + x + db
                            inside = 0 <= y + da < grid[0] and 0 <= x + db < grid[1]
                        if inside:
                            local[:, :, i, j] += mix.local[:, a, b] * expanded[:, :, i2, j2]
    return torch.einsum("gm,bmij->bgij", reduce, local)


shapes = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 4),
        "ratio": st.sampled_from([None, 1, 2, 3]),
        "kernel_size": st.sampled_from([1, 2, 3, 5]),
        "reduction": st.booleans(),
        "tokens": st.integers(1, 7),
        "seed": st.integers(0, 10**6),
    }
).filter(lambda s: s["ratio"] or s["kernel_size"] > 1)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_both_forms_are_the_definition(shape):
    torch.manual_seed(shape["seed"])
    maps = torch.rand(2, shape["heads"], shape["tokens"], shape["tokens"], dtype=torch.float64)
    mix = make_mix(shape["heads"], shape["ratio"], shape["kernel_size"], shape["reduction"])
    expected = naive_refined(maps, mix)
    torch.testing.assert_close(refine_maps(maps, mix), expected, rtol=1e-12, atol=1e-12)
    q, k, v = torch.randn(3, 2, shape["heads"], shape["tokens"], 4, dtype=torch.float64)
    reference = refined_attention(q, k, v, mix, impl="reference")
    torch.testing.assert_close(refined_attention(q, k, v, mix, impl="collapsed"), reference, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from([(1, 3), (2, 2), (3, 2)]), st.integers(0, 2))
def test_spatial_form_is_the_definition(shape, grid, prefix):
    torch.manual_seed(shape["seed"])
    tokens = grid[0] * grid[1] + prefix
    maps = torch.rand(1, shape["heads"], tokens, tokens, dtype=torch.float64)
    mix = make_mix(shape["heads"], shape["ratio"], shape["kernel_size"], shape["reduction"])
    expected = naive_refined(maps, mix, grid)
    torch.testing.assert_close(refine_maps(maps, mix, grid=grid), expected, rtol=1e-12, atol=1e-12)
    q, k, v = torch.randn(3, 1, shape["heads"], tokens, 4, dtype=torch.float64)
    reference = refined_attention(q, k, v, mix, grid=grid, impl="reference")
    collapsed = refined_attention(q, k, v, mix, grid=grid, impl="collapsed")
    torch.testing.assert_close(collapsed, reference, rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(shapes, st.data())
def test_masked_keys_stay_zero(shape, data):
    torch.manual_seed(shape["seed"])
    heads, tokens = shape["heads"], shape["tokens"]
    per_head = data.draw(st.booleans())
    visible = torch.rand(2, heads if per_head else 1, tokens, tokens) < 0.6
    mask = visible
    if data.draw(st.booleans()):
        low = data.draw(st.sampled_from([float("-inf"), -1e4, -100.0]))
        if low > float("-inf"):  # a row of equal low numbers hides nothing, as in any softmax
            visible[..., 0] = True
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, low)
    mix = make_mix(heads, shape["ratio"], shape["kernel_size"], shape["reduction"])
    q, k = torch.randn(2, 2, heads, tokens, 4, dtype=torch.float64, requires_grad=True)
    for impl in ("reference", "collapsed"):
        maps = refined_maps(q, k, mix, attn_mask=mask, impl=impl)
        hidden = ~visible if visible.shape[1] in (1, maps.shape[1]) else ~visible.any(dim=1, keepdim=True)
        assert (maps.masked_select(hidden.expand_as(maps)) == 0).all()
        assert maps.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(maps.sum(), (q, k)))


@pytest.mark.parametrize("impl", ["reference", "collapsed"])
@pytest.mark.parametrize(("ratio", "kernel_size", "reduction"), [(2, 3, True), (None, 3, False), (2, 1, False)])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(impl, ratio, kernel_size, reduction, masked):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mix = make_mix(2, ratio, kernel_size, reduction)
    weights = [w.requires_grad_() for w in mix if w is not None]
    mask = torch.tensor([True, True, False, True, True]) if masked else None

    def run(q, k, v, *_):
        return refined_attention(q, k, v, mix, attn_mask=mask, impl=impl)

    assert torch.autograd.gradcheck(run, (*tensors, *weights))


def test_identity_mix_is_plain_attention():
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    plain = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(refined_attention(q, k, v, Mix(expand=torch.eye(4, dtype=torch.float64))), plain)


def test_convolving_keys_of_a_map_is_convolving_the_values():
    """Section 3.3: Σ_j A*_ij v_j = Σ_j A_ij Σ_a w_a v_{j-a+⌊k/2⌋}, for a 1-D kernel along the keys."""
    q, k, v = torch.randn(3, 1, 1, 7, 4, dtype=torch.float64)
    weight = torch.randn(3, dtype=torch.float64)
    kernel = torch.zeros(1, 3, 3, dtype=torch.float64)
    kernel[0, 1] = weight
    refined = refined_attention(q, k, v, Mix(local=kernel))
    values = torch.zeros_like(v)
    for j in range(7):
        for a in range(3):
            if 0 <= j - a + 1 < 7:
                values[:, :, j] += weight[a] * v[:, :, j - a + 1]
    torch.testing.assert_close(refined, attention_maps(q, k) @ values)


def test_unknown_implementation_is_named_with_those_there_are():
    q = torch.randn(1, 1, 2, 2)
    with pytest.raises(UserError, match=r"no implementation 'cuda'; .* auto, reference, collapsed, sdpa, triton"):
        refined_attention(q, q, q, Mix(expand=torch.eye(1)), impl="cuda")
    with pytest.raises(UserError, match=r"no implementation 'sdpa'; .* auto, reference, collapsed, triton"):
        refined_attention_and_maps(q, q, q, Mix(expand=torch.eye(1)), impl="sdpa")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", ["reference", "collapsed"])
def test_an_additive_mask_may_be_of_a_wider_type(dtype, impl):
    """As in `F.scaled_dot_product_attention`, which takes a float32 mask beside queries in half precision."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    mix = make_mix(4, 2, 3, True)
    mask = torch.randn(6, 6).masked_fill(torch.rand(6, 6) < 0.3, -torch.inf)
    exact = refined_attention(q, k, v, mix, attn_mask=mask.double(), impl=impl)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    out = refined_attention(q, k, v, Mix(*(w.to(dtype) for w in mix)), attn_mask=mask, impl=impl)
    assert out.dtype == dtype
    assert (out - exact).norm() / exact.norm() < 2e-2


@pytest.mark.parametrize("impl", ["reference", "collapsed"])
def test_a_mask_of_heads_needs_no_batch(impl):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    visible = torch.rand(4, 6, 6) < 0.6
    for reduction in (True, False):
        mix = make_mix(4, 2, 3, reduction)
        expected = refined_attention(q, k, v, mix, attn_mask=visible[None], impl=impl)
        assert refined_attention(q, k, v, mix, attn_mask=visible, impl=impl).equal(expected)


@pytest.mark.parametrize("impl", ["reference", "collapsed", "sdpa"])
@pytest.mark.parametrize("grid", [None, (2, 3)])
def test_no_image_at_all(impl, grid):
    q, k, v = torch.randn(3, 0, 4, 7, 8)
    mix = make_mix(4, None if impl == "sdpa" else 2, 3, True, torch.float32)
    assert refined_attention(q, k, v, mix, grid=grid, impl=impl).shape == (0, 4, 7, 8)


@pytest.mark.parametrize("impl", ["reference", "collapsed", "sdpa"])
@pytest.mark.parametrize("grid", [None, (2, 3)])
def test_gradients_of_each_image_alone(impl, grid):
    """`torch.func.vmap` over `grad`: what per-sample gradients are made of."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 4, 7, 8, dtype=torch.float64)
    mix = make_mix(4, None if impl == "sdpa" else 2, 3, True)

    def energy(local, *image):
        image = (t[None] for t in image)
        return refined_attention(*image, mix._replace(local=local), grid=grid, impl=impl).square().sum()

    together = torch.func.vmap(torch.func.grad(energy), (None, 0, 0, 0))(mix.local, q, k, v)
    one_by_one = [torch.func.grad(energy)(mix.local, *image) for image in zip(q, k, v, strict=True)]
    torch.testing.assert_close(together, torch.stack(one_by_one))


def test_mix_without_a_step_is_refused():
    with pytest.raises(UserError, match="has no step"):
        Mix().fold()


def test_dla_through_sdpa():
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    mix = Mix(local=torch.randn(4, 3, 3, dtype=torch.float64))
    torch.testing.assert_close(refined_attention(q, k, v, mix, impl="sdpa"), refined_attention(q, k, v, mix))
    with pytest.raises(UserError, match="does not mix heads"):
        refined_attention(q, k, v, mix._replace(expand=torch.eye(4, dtype=torch.float64)), impl="sdpa")
