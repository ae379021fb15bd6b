"""Streamed statistics against whole maps in float64, cases with a known answer, and memory that stays linear."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrefine.errors import UserError
from vitrefine.ops.attention_statistics import attention_statistics
from vitrefine.ops.refined_attention import attention_maps

MODULE = importlib.import_module("vitrefine.ops.attention_statistics")  # the package gives the function that name


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
