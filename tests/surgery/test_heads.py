"""Heads are found where a model keeps them, and every layout is read and written back exactly."""

import pytest
import timm
import torch
from torch import Tensor, nn

from vitrefine.surgery.heads import HeadAxis, head_axes
from vitrefine.surgery.survey import survey

FOLDED = {12: HeadAxis(None, folded=12), 8: HeadAxis(None, folded=8)}

# Layouts that real models have: the shape of the maps of two images, where the heads are, and how many there are.
LAYOUTS = {
    "vit": ((2, 3, 17, 17), HeadAxis(), 3),
    "pvt_v2, reduced keys": ((2, 2, 64, 4), HeadAxis(), 2),
    "swin, windows in the batch": ((18, 3, 49, 49), HeadAxis(), 3),
    "cait, one query": ((2, 4, 1, 17), HeadAxis(), 4),
    "twins, windows before heads": ((2, 9, 2, 49, 49), HeadAxis(-3), 2),
    "hiera, windows after heads": ((2, 2, 9, 4, 16), HeadAxis(-4), 2),
    "nest, one window after heads": ((2, 12, 1, 16, 16), HeadAxis(-4), 12),
    "sam, heads in the batch": ((24, 16, 16), HeadAxis(None, folded=12), 12),
    "halonet, heads in the batch and windows": ((16, 4, 16, 36), HeadAxis(None, folded=8), 8),
    "shvit, one head and no axis for it": ((2, 16, 16), HeadAxis(None), 1),
}


def _head_of_each(shape: tuple[int, ...], axis: HeadAxis, heads: int) -> Tensor:
    """Maps that hold the number of their own head everywhere."""
    numbers = torch.arange(heads, dtype=torch.float64)
    if axis.folded:
        return numbers.repeat(shape[0] // heads).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    if axis.axis is None:
        return torch.zeros(shape, dtype=torch.float64)
    return numbers.reshape(-1, *[1] * (-axis.axis - 1)).expand(shape)


@pytest.mark.parametrize(("shape", "axis", "heads"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_join_undoes_split(shape: tuple[int, ...], axis: HeadAxis, heads: int) -> None:
    maps = torch.randn(shape, dtype=torch.float64)
    split = axis.split(maps)
    assert split.ndim == 4
    assert split.shape[1:] == (heads, *shape[-2:])
    assert torch.equal(axis.join(split, shape), maps)


@pytest.mark.parametrize(("shape", "axis", "heads"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_split_keeps_heads_apart(shape: tuple[int, ...], axis: HeadAxis, heads: int) -> None:
    split = axis.split(_head_of_each(shape, axis, heads))
    for head in range(heads):
        assert (split[:, head] == head).all()


@pytest.mark.parametrize(("shape", "axis", "heads"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_images_and_windows_stay_apart(shape: tuple[int, ...], axis: HeadAxis, heads: int) -> None:
    """A function of one (image, window) at a time, mixing its heads, gives the same before and after splitting."""
    maps = torch.randn(shape, dtype=torch.float64)
    mix = torch.randn(heads, heads, dtype=torch.float64)
    changed = axis.join(torch.einsum("gh,bhij->bgij", mix, axis.split(maps)), shape)
    if axis.folded:
        expected = torch.einsum("gh,bh...->bg...", mix, maps.unflatten(0, (-1, heads))).flatten(0, 1)
    elif axis.axis is None:
        expected = mix.item() * maps
    else:
        expected = torch.einsum("gh,...h->...g", mix, maps.movedim(axis.axis, -1)).movedim(-1, axis.axis)
    torch.testing.assert_close(changed, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("shape", "axis", "heads"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_queries_and_values_split_as_maps_do(shape: tuple[int, ...], axis: HeadAxis, heads: int) -> None:
    """What a tap does to a fused attention, without refining it: q, k and v split, attended with and joined."""
    q = torch.randn(*shape[:-1], 8, dtype=torch.float64)
    k = torch.randn(*shape[:-2], shape[-1], 8, dtype=torch.float64)
    v = torch.randn(*shape[:-2], shape[-1], 5, dtype=torch.float64)
    expected = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
    maps = (axis.split(q) @ axis.split(k).transpose(-2, -1)).softmax(dim=-1)
    out = axis.join(maps @ axis.split(v), q.shape)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


def _states(heads: int) -> nn.Module:
    module = nn.Module()
    module.num_heads = heads
    return module


@pytest.mark.parametrize(("shape", "axis", "heads"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_stated_heads_are_found(shape: tuple[int, ...], axis: HeadAxis, heads: int) -> None:
    if axis == HeadAxis(None):  # a single head has no axis to be found, and is folded as well as not
        axis = HeadAxis(None, folded=1)
    batch = 18 if shape[0] == 18 else 2
    assert (axis, heads) in head_axes(_states(heads), shape, batch)


def test_unstated_heads_are_beside_the_maps() -> None:
    assert head_axes(nn.Module(), (2, 3, 9, 9), 2) == [(HeadAxis(), 3)]
    assert head_axes(nn.Module(), (2, 9, 9), 2) == [(HeadAxis(None), 1)]


def test_windows_in_the_batch_are_not_folded_heads() -> None:
    """Four windows of two images, one map each from a module with four heads: 8 is a multiple of 2·4 by accident."""
    assert head_axes(_states(4), (8, 9, 9), batch=8) == [(HeadAxis(None), 1)]
    assert head_axes(_states(4), (8, 9, 9), batch=2) == [(HeadAxis(None, folded=4), 4)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hiera_tiny_224", {HeadAxis(-4), HeadAxis()}),  # in windows, then without
        ("nest_tiny", {HeadAxis(-4)}),
        ("twins_svt_small", {HeadAxis()}),
        ("samvit_base_patch16_224", {FOLDED[12]}),
        ("halonet_h1", {FOLDED[8]}),
        ("shvit_s1", {HeadAxis(None)}),
    ],
)
def test_models_are_read_right(name: str, expected: set[HeadAxis]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert {site.axis for site in survey(model).attentions} == expected


def test_as_many_windows_as_heads() -> None:
    """Two windows and two heads: only the other blocks of the model tell which is which."""
    with torch.device("meta"):
        model = timm.create_model("hiera_tiny_224", img_size=(32, 64))
    sites = survey(model, {"": torch.empty(2, 3, 32, 64)}).attentions
    assert any(site.maps[0][1:3] == (2, 2) for site in sites)
    assert {site.axis for site in sites if len(site.maps[0]) == 5} == {HeadAxis(-4)}
