"""Streamed statistics against whole maps in float64, cases with a known answer, and memory that stays linear.

Without a GPU the kernels run in Triton's interpreter, in a process of their own (see test_deformable_merge_triton). The
interpreter cannot multiply bfloat16.
"""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_here import DEVICE, on_gpu, runs_interpreter, runs_kernels

from vitrefine.errors import UserError
from vitrefine.ops.attention_statistics import attention_statistics
from vitrefine.ops.refined_attention import attention_maps

MODULE = importlib.import_module("vitrefine.ops.attention_statistics")  # the package gives the function that name


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__, "-k", "kernel")


def naive(q, k, scale, mask, coordinates):
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    maps = scores.softmax(-1)
    entropy = -(maps * maps.clamp(min=1e-300).log()).sum(-1)
    flat = torch.nn.functional.normalize(maps.flatten(2), dim=-1)
    apart = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    if coordinates is not None:
        for i in range(q.shape[2]):
            for j in range(k.shape[2]):
                if not coordinates[j].isnan().any():
                    apart[i, j] = (coordinates[i] - coordinates[j]).abs().sum()
    return entropy, maps.square().sum(-1), flat @ flat.mT, (maps * apart).sum(-1)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(2, 9), st.sampled_from([None, 0.7]),
    st.sampled_from(["none", "keys", "pairs", "additive"]), st.integers(1, 200), st.integers(0, 10**6),
)  # fmt: skip
def test_equals_whole_maps(batch, heads, tokens, scale, masked, entries, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(2, batch, heads, tokens, 5, dtype=torch.float64)
    mask = None
    if masked == "additive":
        mask = torch.randn(tokens, tokens, dtype=torch.float64)
    elif masked != "none":
        shape = (batch, 1, 1, tokens) if masked == "keys" else (batch, heads, tokens, tokens)
        mask = torch.rand(shape) > 0.4
        mask[..., 0] = True
    coordinates = torch.rand(tokens, 2, dtype=torch.float64)
    coordinates[0] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "ENTRIES", entries)
        ours = attention_statistics(q, k, scale=scale, mask=mask, coordinates=coordinates)
    entropy, squares, similarity, distance = naive(q, k, scale, mask, coordinates)
    torch.testing.assert_close(ours.entropy, entropy)
    torch.testing.assert_close(ours.squares, squares)
    torch.testing.assert_close(ours.similarity, similarity)
    torch.testing.assert_close(ours.distance[..., 1:], distance[..., 1:])
    assert ours.distance[..., 0].isnan().all()


def test_uniform_and_one_hot_attention():
    q = torch.zeros(1, 2, 16, 4)
    found = attention_statistics(q, torch.randn(1, 2, 16, 4))
    torch.testing.assert_close(found.entropy, torch.full((1, 2, 16), math.log(16)))
    torch.testing.assert_close(found.squares, torch.full((1, 2, 16), 1 / 16))
    torch.testing.assert_close(found.similarity, torch.ones(1, 2, 2))
    assert found.distance is None
    places = torch.eye(8)[None, None]
    sharp = attention_statistics(100 * places, 100 * places, coordinates=torch.arange(8.0)[:, None])
    assert sharp.entropy.abs().max() < 1e-6
    assert sharp.distance.abs().max() < 1e-6


def test_heads_that_look_elsewhere_are_not_alike():
    keys = torch.eye(8)[None, None].expand(1, 2, 8, 8)
    queries = torch.stack([torch.eye(8), torch.eye(8).roll(1, 0)])[None]
    similarity = attention_statistics(100 * queries, 100 * keys).similarity
    torch.testing.assert_close(similarity[0], torch.eye(2), rtol=0, atol=1e-6)


def test_half_precision_is_summed_in_single():
    q, k = torch.randn(2, 1, 3, 64, 8)
    half = attention_statistics(q.bfloat16(), k.bfloat16())
    assert half.entropy.dtype == torch.float32
    torch.testing.assert_close(half.entropy, attention_statistics(q.bfloat16().float(), k.bfloat16().float()).entropy)


def test_autocast_changes_nothing():
    torch.manual_seed(0)
    q, k = 3 * torch.randn(2, 2, 4, 20, 16)
    plain = attention_statistics(q, k, query=3)
    with torch.autocast("cpu", torch.bfloat16):
        under = attention_statistics(q, k, query=3)
    for one, other in zip(plain, under, strict=True):
        assert one is other is None or one.equal(other)


def test_no_tile_outgrows_its_bound(monkeypatch):
    seen = []

    def watched(*args, **kwargs):
        maps = attention_maps(*args, **kwargs)
        seen.append(maps.numel())
        return maps

    monkeypatch.setattr(MODULE, "ENTRIES", 4096)
    monkeypatch.setattr(MODULE, "attention_maps", watched)
    q = torch.randn(4, 2, 256, 8)
    attention_statistics(q, q)
    assert max(seen) <= 4096
    assert sum(seen) == 4 * 2 * 256 * 256


def test_coordinates_must_fit():
    q = torch.randn(1, 1, 6, 4)
    with pytest.raises(UserError, match="5 coordinates"):
        attention_statistics(q, q, coordinates=torch.zeros(5, 2))


def test_queries_and_implementations_must_exist():
    q = torch.randn(1, 1, 6, 4)
    with pytest.raises(UserError, match="there is no query 6"):
        attention_statistics(q, q, query=6)
    with pytest.raises(UserError, match="no implementation 'fast'"):
        attention_statistics(q, q, impl="fast")


def test_heads_that_see_nothing_are_like_none():
    q = torch.randn(1, 2, 5, 4)
    mask = torch.ones(1, 2, 1, 5, dtype=torch.bool)
    mask[:, 1] = False
    found = attention_statistics(q, q, mask=mask, impl="reference")
    torch.testing.assert_close(found.similarity, torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]))
    assert found.entropy[:, 1].eq(0).all()


def inputs(batch=2, heads=3, tokens=37, dim=16, dtype=torch.float32, queries=None):
    """Queries and keys as a layer hands them over, parts of one projection."""
    projected = 2 * torch.randn(batch, tokens, 3, heads, dim)
    q, k, _ = projected.to(DEVICE, dtype).permute(2, 0, 3, 1, 4)
    return q[:, :, :queries], k


def check(q, k, atol=1e-4, **options):
    ours = attention_statistics(q, k, impl="triton", **options)
    exact = attention_statistics(q.double(), k.double(), impl="reference", **options)
    for name, value, expected in zip(ours._fields, ours, exact, strict=True):
        if expected is None:
            assert value is None
            continue
        assert value.dtype == torch.float32
        close = {"rtol": 0, "atol": atol, "equal_nan": True}
        torch.testing.assert_close(value.double(), expected, **close, msg=lambda text, name=name: f"{name}: {text}")
    return ours


def places(tokens, axes=2):
    found = torch.rand(tokens, axes, device=DEVICE)
    found[0] = torch.nan
    found[tokens // 2, 0] = torch.nan
    return found


@runs_kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("heads", "tokens", "dim", "dtype", "axes"),
    [
        (3, 37, 16, torch.float32, 2),
        (6, 65, 64, torch.float16, 2),
        (1, 7, 20, torch.float32, 1),  # channels, tokens and axes that fill no tile
        (12, 32, 32, torch.float32, 2),  # tiles that are filled exactly
        (17, 19, 128, torch.float32, 2),  # channels in parts
    ],
)
def test_kernel_follows_the_specification(heads, tokens, dim, dtype, axes):
    q, k = inputs(heads=heads, tokens=tokens, dim=dim, dtype=dtype)
    check(q, k, coordinates=places(tokens, axes), query=tokens // 2)
    check(q, k, scale=0.3)


@runs_kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("masked", ["keys", "pairs", "bias", "bias of heads"])
def test_kernel_takes_masks(masked):
    q, k = inputs()
    if "bias" in masked:
        mask = torch.randn(*((1, 3) if "heads" in masked else ()), 37, 37, device=DEVICE)
        mask[..., 7] = torch.finfo(torch.float16).min
        mask[..., 4, :] = -torch.inf
    else:
        mask = torch.rand((2, 1, 1, 37) if masked == "keys" else (2, 3, 37, 37), device=DEVICE) > 0.4
        mask[0, -1, -1] = False  # a row, or all rows of an image, that see nothing
    check(q, k, mask=mask, coordinates=places(37), query=4)


@runs_kernels
@pytest.mark.usefixtures("poisoned")
def test_kernel_takes_fewer_queries_than_keys():
    check(*inputs(queries=5), query=2)


@runs_kernels
def test_kernel_is_exact_where_attention_is_one_hot_or_uniform():
    tokens = 37
    one_hot = 100 * torch.eye(tokens, device=DEVICE)[None, None].expand(1, 2, tokens, tokens)
    sharp = attention_statistics(one_hot, one_hot, coordinates=places(tokens), impl="triton")
    assert sharp.entropy.eq(0).all()
    torch.testing.assert_close(sharp.squares, torch.ones_like(sharp.squares))
    assert sharp.distance.nan_to_num().eq(0).all()
    torch.testing.assert_close(sharp.similarity, torch.ones_like(sharp.similarity))
    even = attention_statistics(torch.zeros_like(one_hot), one_hot, query=1, impl="triton")
    close = {"rtol": 5e-7, "atol": 0}
    torch.testing.assert_close(even.entropy, torch.full_like(even.entropy, math.log(tokens)), **close)
    torch.testing.assert_close(even.squares, torch.full_like(even.squares, 1 / tokens), **close)
    torch.testing.assert_close(even.row, torch.full_like(even.row, 1 / tokens), rtol=1e-6, atol=0)


@runs_kernels
def test_kernel_keeps_its_digits_where_scores_are_large():
    """Entropies of next to nothing beside scores of hundreds: two large numbers would cancel.

    Products of whole numbers are exact in any precision.
    """
    q, k = (tensor.round() for tensor in inputs(tokens=33))
    check(q, 30 * k)


@runs_kernels
def test_kernel_gives_the_same_bits_twice():
    q, k = inputs()
    coordinates = torch.rand(37, 2, device=DEVICE)
    runs = [attention_statistics(q, k, coordinates=coordinates, query=3, impl="triton") for _ in range(2)]
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


@runs_kernels
def test_kernel_operator_is_registered_soundly():
    import vitrefine.ops.kernels.attention_statistics_op  # noqa: F401  registers the operator

    q, k = inputs(batch=1, tokens=5)
    arguments = (q.detach(), k.detach(), None, torch.rand(5, 2, device=DEVICE), 0.25, 2)
    torch.library.opcheck(torch.ops.vitrefine.attention_statistics.default, arguments)


@runs_kernels
def test_kernel_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="at most 32 heads of 128 channels"):
        attention_statistics(*inputs(dim=160), impl="triton")
    with pytest.raises(UserError, match="float64"):
        attention_statistics(*inputs(dtype=torch.float64), impl="triton")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(6, 197, 64), (12, 577, 64), (16, 785, 128), (32, 49, 32)])
def test_kernel_at_model_shapes(heads, tokens, dim, dtype):
    q, k = inputs(heads=heads, tokens=tokens, dim=dim, dtype=dtype)
    check(q, k, coordinates=places(tokens), query=tokens // 2)
    check(q, k, mask=torch.rand(1, heads, tokens, tokens, device=DEVICE))
    check(q, k, mask=torch.rand(2, 1, 1, tokens, device=DEVICE) > 0.3)


@on_gpu
def test_kernel_memory_is_linear_in_tokens():
    q, k = inputs(batch=1, heads=6, tokens=16_384, dim=64, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention_statistics(q, k, query=0)
    assert torch.cuda.max_memory_allocated() - before < 16 << 20
