"""Positions at the size they were made for, and at others."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from vitrefine.layers.position import RelativePositionBias, resize_position

GRIDS = [(1, 1), (3, 3), (2, 5), (7, 4)]


def bias_of(grid: tuple[int, int]) -> RelativePositionBias:
    torch.manual_seed(0)
    return RelativePositionBias(3, grid, dtype=torch.float64)


def by_loops(table: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """One query and one key at a time; `table` is (2h - 1, 2w - 1, heads)."""
    height, width = grid
    bias = torch.empty(table.shape[-1], height * width, height * width, dtype=table.dtype)
    places = list(itertools.product(range(height), range(width)))
    for (i, (row, column)), (j, (key_row, key_column)) in itertools.product(enumerate(places), repeat=2):
        bias[:, i, j] = table[row - key_row + height - 1, column - key_column + width - 1]
    return bias


@pytest.mark.parametrize("grid", GRIDS)
def test_relative_bias_equals_loops(grid: tuple[int, int]) -> None:
    module = bias_of(grid)
    assert module.table.shape == ((2 * grid[0] - 1) * (2 * grid[1] - 1), 3)
    table = module.table.detach().reshape(2 * grid[0] - 1, 2 * grid[1] - 1, 3)
    torch.testing.assert_close(module(grid), by_loops(table, grid), rtol=0, atol=0)


@pytest.mark.parametrize(("built", "wanted"), itertools.permutations(GRIDS[1:], 2))
def test_relative_bias_of_another_grid(built: tuple[int, int], wanted: tuple[int, int]) -> None:
    module = bias_of(built)
    table = module.table.detach().reshape(2 * built[0] - 1, 2 * built[1] - 1, 3).permute(2, 0, 1)[None]
    size = (2 * wanted[0] - 1, 2 * wanted[1] - 1)
    table = F.interpolate(table, size, mode="bicubic")[0].permute(1, 2, 0)
    torch.testing.assert_close(module(wanted), by_loops(table, wanted))


@pytest.mark.parametrize("wanted", [(6, 6), (3, 8)])
def test_relative_bias_depends_on_displacement_alone(wanted: tuple[int, int]) -> None:
    bias = bias_of((4, 4))(wanted).unflatten(2, wanted).unflatten(1, wanted)
    torch.testing.assert_close(bias[:, 1:, 1:, 1:, 1:], bias[:, :-1, :-1, :-1, :-1])


def test_relative_bias_passes_gradients_at_any_grid() -> None:
    module = bias_of((3, 3))
    module((5, 4)).square().sum().backward()
    assert module.table.grad is not None
    assert module.table.grad.abs().sum() > 0


def test_relative_bias_is_made_without_storage() -> None:
    module = RelativePositionBias(2, (3, 3), device="meta").to_empty(device="cpu")
    module.reset_parameters()
    assert 0 < module.table.std() < 0.05


def positions(prefix: int, grid: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, prefix + grid[0] * grid[1], 5, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("new", [(6, 6), (2, 9), (3, 3)])
def test_resize(prefix: int, mode: str, new: tuple[int, int]) -> None:
    old = (4, 5)
    position = positions(prefix, old)
    resized = resize_position(position, old, new, mode=mode)
    assert resized.shape == (1, prefix + new[0] * new[1], 5)
    torch.testing.assert_close(resized[:, :prefix], position[:, :prefix], rtol=0, atol=0)
    image = position[:, prefix:].reshape(1, *old, 5).permute(0, 3, 1, 2)
    expected = F.interpolate(image, new, mode=mode, align_corners=mode == "bilinear")
    torch.testing.assert_close(resized[:, prefix:].reshape(1, *new, 5).permute(0, 3, 1, 2), expected)


def test_resize_to_the_same_grid_is_nothing() -> None:
    position = positions(1, (4, 5))
    assert resize_position(position, (4, 5), (4, 5)) is position


def test_resize_tells_grids_of_equal_area_apart() -> None:
    position = positions(1, (2, 6))
    assert not torch.equal(resize_position(position, (2, 6), (3, 4)), position)


def test_bilinear_keeps_the_corners() -> None:
    old, new = (3, 4), (7, 9)
    before = positions(0, old).reshape(*old, 5)
    after = resize_position(positions(0, old), old, new, mode="bilinear").reshape(*new, 5)
    for row, column in itertools.product((0, -1), repeat=2):
        torch.testing.assert_close(after[row, column], before[row, column])


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_equal_positions_stay_equal(mode: str) -> None:
    position = torch.full((1, 10, 2), 0.7, dtype=torch.float64)
    resized = resize_position(position, (3, 3), (5, 8), mode=mode)
    torch.testing.assert_close(resized, torch.full((1, 41, 2), 0.7, dtype=torch.float64))
