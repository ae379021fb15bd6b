"""Global attention with LIT's relative bias: by the book, at sizes it was and was not built for, and with dropout."""

import pytest
import torch
import torch.nn.functional as F

from vitrefine.layers.attention import GlobalAttention, split_heads


def build(**options: object) -> GlobalAttention:
    torch.manual_seed(0)
    return GlobalAttention(24, 3, grid=(3, 4), dtype=torch.float64, **options)


def by_the_book(module: GlobalAttention, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    q, k, v = (split_heads(part, 3) for part in module.qkv(x).chunk(3, dim=-1))
    maps = (q @ k.mT / 8**0.5 + module.position(grid)).softmax(dim=-1)
    return module.proj((maps @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("grid", [(3, 4), (5, 2)])
def test_bias_is_that_of_the_displacement(grid: tuple[int, int]) -> None:
    module, x = build(), torch.randn(2, grid[0] * grid[1], 24, dtype=torch.float64)
    torch.testing.assert_close(module(x, grid), by_the_book(module, x, grid))
    module(x, grid).square().sum().backward()
    assert module.position.table.grad.abs().sum() > 0


def test_dropout_is_for_training_and_keeps_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build(attn_drop=0.5), torch.randn(2, 12, 24, dtype=torch.float64)
    torch.testing.assert_close(module.eval()(x, (3, 4)), by_the_book(module, x, (3, 4)))
    seen = {}
    plain = F.scaled_dot_product_attention

    def watched(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen.update(kwargs)
        return plain(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert not torch.allclose(module.train()(x, (3, 4)), module(x, (3, 4)))
    assert seen["dropout_p"] == 0.5
    torch.testing.assert_close(seen["attn_mask"][0], module.position((3, 4)))


def test_without_a_grid_there_is_no_bias() -> None:
    torch.manual_seed(0)
    module, x = GlobalAttention(24, 3, dtype=torch.float64), torch.randn(2, 12, 24, dtype=torch.float64)
    order = torch.randperm(12)
    torch.testing.assert_close(module(x[:, order], (3, 4)), module(x, (3, 4))[:, order])
