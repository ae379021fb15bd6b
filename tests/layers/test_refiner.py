"""The refiner's options, one by one, and where it starts."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.layers.refiner import (
    CONSTRAINTS,
    Refiner,
    attention_expansion,
    distributed_local_attention,
    talking_heads,
)

HEADS, GRID = 4, (3, 4)
TOKENS = 1 + GRID[0] * GRID[1]
OPTIONS = [
    {"expansion": expansion, "kernel_size": kernel_size, "reduction": reduction, "constraint": constraint}
    for expansion, kernel_size, reduction, constraint in itertools.product(
        (None, 1, 2, 3, 6), (1, 2, 3, 5), (True, False), CONSTRAINTS
    )
    if expansion is not None or kernel_size > 1
]


def softmax_maps(heads: int = HEADS, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    scores = torch.randn(2, heads, TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return scores.softmax(dim=-1)


def identity(maps: Tensor, refiner: Refiner) -> Tensor:
    """What leaves a refiner that does nothing: each head's map, as often as there are maps of it."""
    return maps.repeat_interleave(refiner.out_heads // maps.shape[1], dim=1)


def name(options: dict) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_starts_as_the_identity(options: dict) -> None:
    refiner = Refiner(HEADS, **options)
    maps = softmax_maps()
    torch.testing.assert_close(refiner(maps, GRID), identity(maps, refiner), rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 12, 16])
def test_starts_as_the_identity_with_many_heads(heads: int) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        refiner = Refiner(heads, expansion=6)
        maps = softmax_maps(heads, seed)
        torch.testing.assert_close(refiner(maps), maps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_made_without_storage_and_filled_later(options: dict) -> None:
    with torch.device("meta"):
        refiner = Refiner(HEADS, **options)
    assert all(parameter.is_meta for parameter in refiner.parameters())
    refiner.to_empty(device="cpu")
    for parameter in refiner.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    refiner.reset_parameters()
    maps = softmax_maps()
    torch.testing.assert_close(refiner(maps, GRID), identity(maps, refiner), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
def test_dtype(dtype: torch.dtype, tolerance: float) -> None:
    refiner = Refiner(HEADS, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in refiner.parameters()} == {dtype}
    maps = softmax_maps(dtype=torch.float64).to(dtype)
    torch.testing.assert_close(refiner(maps), maps, rtol=0, atol=tolerance)


def test_starts_as_the_identity_wherever_it_is_made() -> None:
    maps = softmax_maps()
    with torch.autocast("cpu", torch.bfloat16):
        refiner = Refiner(HEADS)
    torch.testing.assert_close(refiner(maps), maps, rtol=0, atol=1e-6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        refiner = Refiner(HEADS)
    finally:
        torch.set_default_dtype(before)
    assert {parameter.dtype for parameter in refiner.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(refiner.float()(maps), maps, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"constraint": "diagonal"}, r"no constraint 'diagonal'; choose one of none, spatial, row\+col"),
        ({"kernel_size": 0}, "kernel_size=0 is too small; 1 leaves the convolution out"),
        ({"expansion": 0.5}, "expansion=0.5 does not give each of 4 heads the same number of maps"),
        ({"expansion": 1.5}, "expansion=1.5 does not give each of 4 heads the same number of maps"),
        ({"expansion": None, "kernel_size": 1}, "would do nothing: give it an expansion or a kernel_size above 1"),
    ],
)
def test_options_that_make_no_sense(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Refiner(HEADS, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_parameters_and_maps(options: dict) -> None:
    refiner = Refiner(HEADS, **options)
    expansion, kernel_size = options["expansion"], options["kernel_size"]
    hidden = HEADS * (expansion or 1)
    talking = expansion == 1 and kernel_size == 1
    expected = {
        "expand": hidden * HEADS if expansion else 0,
        "reduce": HEADS * hidden if expansion and options["reduction"] and not talking else 0,
        "local": 0 if kernel_size == 1 else hidden * kernel_size**2,
    }
    if options["constraint"] == "row+col" and kernel_size > 1:
        expected |= {"local": 0, "row": hidden * kernel_size, "column": hidden * kernel_size}
    counts = {n: parameter.numel() for n, parameter in refiner.named_parameters()}
    assert counts == {n: count for n, count in expected.items() if count}
    assert refiner.out_heads == (HEADS if options["reduction"] else hidden)
    assert refiner(softmax_maps(), GRID).shape[1] == refiner.out_heads


def test_the_named_kinds() -> None:
    assert {n for n, _ in distributed_local_attention(HEADS).named_parameters()} == {"local"}
    assert {n for n, _ in attention_expansion(HEADS).named_parameters()} == {"expand", "reduce"}
    assert {n for n, _ in talking_heads(HEADS).named_parameters()} == {"expand"}
    assert distributed_local_attention(HEADS, 5, constraint="row+col").kernel_size == 5


@pytest.mark.parametrize("kernel_size", [2, 3, 5])
def test_row_and_column_kernels_make_a_cross(kernel_size: int) -> None:
    refiner = distributed_local_attention(HEADS, kernel_size, constraint="row+col", dtype=torch.float64)
    for parameter in refiner.parameters():
        torch.nn.init.normal_(parameter)
    kernel = refiner.mix().local
    assert kernel is not None
    centre = (kernel_size - 1) // 2
    off_cross = [(a, b) for a in range(kernel_size) for b in range(kernel_size) if centre not in (a, b)]
    assert all(kernel[:, a, b].eq(0).all() for a, b in off_cross)

    maps = softmax_maps(dtype=torch.float64)
    before, after = centre, kernel_size - 1 - centre
    assert refiner.row is not None
    assert refiner.column is not None
    along_keys = F.conv2d(F.pad(maps, (before, after)), refiner.row[:, None, None], groups=HEADS)
    along_queries = F.conv2d(F.pad(maps, (0, 0, before, after)), refiner.column[:, None, :, None], groups=HEADS)
    torch.testing.assert_close(refiner(maps), along_keys + along_queries)


def test_unconstrained_kernels_slide_over_query_and_key() -> None:
    refiner = distributed_local_attention(HEADS, dtype=torch.float64)
    torch.nn.init.normal_(refiner.local)
    maps = softmax_maps(dtype=torch.float64)
    refined = refiner(maps)
    for i, j in ((0, 0), (4, 7), (TOKENS - 1, 2)):
        expected = torch.zeros(2, HEADS, dtype=torch.float64)
        for a, b in itertools.product(range(3), repeat=2):
            row, column = i + a - 1, j + b - 1
            if 0 <= row < TOKENS and 0 <= column < TOKENS:
                expected += refiner.local[:, a, b] * maps[:, :, row, column]
        torch.testing.assert_close(refined[:, :, i, j], expected)


def test_spatial_kernels_slide_over_the_image() -> None:
    refiner = distributed_local_attention(HEADS, constraint="spatial", dtype=torch.float64)
    torch.nn.init.normal_(refiner.local)
    maps = softmax_maps(dtype=torch.float64)
    refined = refiner(maps, GRID)
    torch.testing.assert_close(refined[..., 0], maps[..., 0])  # the class token is no place in the image
    for query in (0, 5):
        image = maps[:, :, query, 1:].unflatten(-1, GRID)
        expected = F.conv2d(image, refiner.local[:, None], padding=1, groups=HEADS)
        torch.testing.assert_close(refined[:, :, query, 1:], expected.flatten(2))


def test_spatial_needs_a_grid_and_others_ignore_it() -> None:
    with pytest.raises(UserError, match="constraint=spatial needs the height and width"):
        Refiner(HEADS, constraint="spatial")(softmax_maps())
    refiner = Refiner(HEADS)
    torch.nn.init.normal_(refiner.local)
    torch.testing.assert_close(refiner(softmax_maps(), GRID), refiner(softmax_maps()))


def one_step(refiner: Refiner) -> None:
    maps = softmax_maps()
    target = torch.randn(2, refiner.out_heads, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
    (refiner(maps, GRID) * target).sum().backward()
    torch.optim.SGD(refiner.parameters(), lr=0.1).step()


def test_copies_of_a_head_part_after_one_step() -> None:
    torch.manual_seed(0)
    refiner = Refiner(HEADS, expansion=3)
    kernels = refiner.local.detach().unflatten(0, (HEADS, 3))
    assert kernels.eq(kernels[:, :1]).all(), "the copies start with the same kernel"
    one_step(refiner)
    kernels = refiner.local.detach().unflatten(0, (HEADS, 3))
    for first, second in itertools.combinations(range(3), 2):
        assert (kernels[:, first] - kernels[:, second]).abs().amax(dim=(-2, -1)).gt(1e-4).all()


def test_exact_copies_would_never_part() -> None:
    """Why the start is stirred: without it, the copies of a head get equal gradients."""
    refiner = Refiner(HEADS, expansion=3)
    with torch.no_grad():
        copies = torch.eye(HEADS).repeat_interleave(3, dim=0)
        refiner.expand.copy_(copies)
        refiner.reduce.copy_(copies.T / 3)
    one_step(refiner)
    kernels = refiner.local.detach().unflatten(0, (HEADS, 3))
    torch.testing.assert_close(kernels, kernels[:, :1].expand_as(kernels))
