"""Each measure against a loop in float64, and by construction."""

import math

import pytest
import torch
from torch import Tensor

from vitrefine.diagnose.grid import TokenGrid, token_grid
from vitrefine.diagnose.measures import (
    head_similarity,
    relative_distance,
    row_entropy,
    softmax_gradient,
    token_similarity,
)


def random_maps(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64).mul(2).softmax(dim=-1)


def test_entropy_of_one_hot_and_uniform_maps_is_exact() -> None:
    assert row_entropy(torch.eye(7, dtype=torch.float64)).tolist() == [0.0] * 7
    uniform = torch.full((5, 8), 1 / 8, dtype=torch.float64)
    torch.testing.assert_close(
        row_entropy(uniform), torch.full((5,), math.log(8), dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_distance_against_a_loop() -> None:
    maps, places = random_maps(2, 3, 7, 7), TokenGrid(1, 2, 3).coordinates().double()
    found = relative_distance(maps, places)
    assert found[:, :, 0].isnan().all()  # a class token is nowhere
    for image in range(2):
        for head in range(3):
            for i in range(1, 7):
                expected = 0.0
                for j in range(1, 7):
                    apart = abs(float(places[i, 0] - places[j, 0])) + abs(float(places[i, 1] - places[j, 1]))
                    expected += float(maps[image, head, i, j]) * apart
                assert found[image, head, i].item() == pytest.approx(expected, abs=1e-14)


def test_distance_of_a_grid_by_hand() -> None:
    """Four patches of a 2×2 grid: half a side to each neighbour, a whole one across."""
    places = token_grid(4, (32, 32)).coordinates()  # type: ignore[union-attr]
    assert places.tolist() == [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
    assert relative_distance(torch.full((4, 4), 0.25), places).tolist() == [0.5] * 4
    across = torch.eye(4).flip(0)
    assert relative_distance(across, places).tolist() == [1.0] * 4
    assert relative_distance(torch.eye(4), places).tolist() == [0.0] * 4


def test_the_gradient_is_the_nuclear_norm_of_the_jacobian() -> None:
    scale = 0.3
    scores = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    jacobian = torch.autograd.functional.jacobian(lambda s: (scale * s).softmax(dim=-1), scores)
    expected = torch.linalg.svdvals(jacobian).sum()
    torch.testing.assert_close(softmax_gradient((scale * scores).softmax(dim=-1), scale), expected)
    uniform = torch.full((6,), 1 / 6, dtype=torch.float64)
    assert softmax_gradient(uniform).item() == pytest.approx(1 - 1 / 6)
    assert softmax_gradient(uniform) > softmax_gradient(scores.softmax(dim=-1))


def test_similarity_of_heads_against_a_loop() -> None:
    maps = random_maps(2, 3, 5, 5)
    found = head_similarity(maps)
    for image in range(2):
        for g in range(3):
            for h in range(3):
                one, other = maps[image, g].flatten().tolist(), maps[image, h].flatten().tolist()
                dot = sum(a * b for a, b in zip(one, other, strict=True))
                norm = math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))
                assert found[image, g, h].item() == pytest.approx(dot / norm, abs=1e-14)


def test_similarity_of_tokens_against_a_loop() -> None:
    tokens = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = token_similarity(tokens)
    for image in range(2):
        cosines = [
            torch.nn.functional.cosine_similarity(tokens[image, i], tokens[image, j], dim=0).item()
            for i in range(6)
            for j in range(6)
            if i != j
        ]
        assert found[image].item() == pytest.approx(sum(cosines) / len(cosines), abs=1e-14)
    assert token_similarity(torch.ones(1, 5, 3)).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("tokens", "size", "said", "expected"),
    [
        (197, (224, 224), 1, (1, 14, 14)),
        (196, (224, 224), 0, (0, 14, 14)),
        (201, (224, 224), 0, (5, 14, 14)),
        (25, (64, 96), 1, (1, 4, 6)),
        (3, (64, 64), 0, None),
        (60, (64, 64), 0, None),
    ],
)
def test_grids(tokens: int, size: tuple[int, int], said: int, expected: tuple[int, int, int] | None) -> None:
    assert token_grid(tokens, size, said) == (expected and TokenGrid(*expected))
