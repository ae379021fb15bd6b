"""CKA: closed forms, invariances, and minibatches against a loop."""

import pytest
import torch

from vitrefine.diagnose.cka import MinibatchCka, evolution, hsic, linear_cka, unbiased_hsic
from vitrefine.errors import UserError
from vitrefine.ops.token_statistics import centred_gram as gram


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_form_that_kornblith_prints() -> None:
    """‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), of centred features."""
    x, y = features(10, 4), features(10, 7, seed=1)
    x0, y0 = x - x.mean(dim=0), y - y.mean(dim=0)
    expected = (y0.T @ x0).norm() ** 2 / ((x0.T @ x0).norm() * (y0.T @ y0).norm())
    assert linear_cka(x, y) == pytest.approx(expected.item(), abs=1e-12)


def test_of_one_feature_it_is_the_squared_correlation() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).double()
    y = torch.tensor([[1.0], [3.0], [2.0], [4.0]]).double()
    assert linear_cka(x, y) == pytest.approx(0.8**2, abs=1e-15)
    assert linear_cka(x, -3 * x + 7) == pytest.approx(1, abs=1e-15)


def test_rotations_and_scale_change_nothing() -> None:
    x, y = features(12, 6), features(12, 5, seed=1)
    rotation, _ = torch.linalg.qr(features(6, 6, seed=2))
    expected = linear_cka(x, y)
    assert linear_cka(x @ rotation, y) == pytest.approx(expected, abs=1e-12)
    assert linear_cka(17 * x + 3, y) == pytest.approx(expected, abs=1e-12)
    assert linear_cka(x, x @ rotation) == pytest.approx(1, abs=1e-12)
    stretched = x * torch.tensor([10, 1, 1, 1, 1, 1])
    assert abs(linear_cka(stretched, y) - expected) > 0.01  # other linear maps do


def test_images_must_be_the_same() -> None:
    with pytest.raises(UserError, match="of 4 and of 5 images cannot be compared"):
        linear_cka(features(4, 2), features(5, 2))


def test_hsic_against_loops() -> None:
    one, other = features(6, 3), features(6, 4, seed=1)
    k, l = one @ one.T, other @ other.T  # noqa: E741
    n = len(k)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    torch.testing.assert_close(hsic(k, l), torch.trace(k @ centring @ l @ centring))
    # Unbiased: the mean over all quadruples of different images of k_ij (l_ij + l_qr − 2 l_iq).
    total, count = 0.0, 0
    for i in range(n):
        for j in range(n):
            for q in range(n):
                for r in range(n):
                    if len({i, j, q, r}) == 4:
                        total += float(k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]))
                        count += 1
    assert unbiased_hsic(torch.stack([k, l]))[0, 1].item() == pytest.approx(total / count, abs=1e-12)
    # Centred features have the same.
    centred = torch.stack([gram(one), gram(other)])
    torch.testing.assert_close(unbiased_hsic(centred), unbiased_hsic(torch.stack([k, l])))
    torch.testing.assert_close(hsic(gram(one), gram(other)), hsic(k, l))
    with pytest.raises(UserError, match="3 images are too few"):
        unbiased_hsic(torch.stack([k, l])[:, :3, :3])


def test_minibatches_average_before_they_divide() -> None:
    x, y = features(24, 5), features(24, 6, seed=1)
    cka = MinibatchCka()
    for some in torch.arange(24).split(8):
        cka.update([gram(x[some]), gram(y[some])])
    found = cka.compute()
    sums = sum(unbiased_hsic(torch.stack([gram(x[some]), gram(y[some])])) for some in torch.arange(24).split(8))
    assert found[0, 1].item() == pytest.approx(float(sums[0, 1] / (sums[0, 0] * sums[1, 1]) ** 0.5))
    torch.testing.assert_close(found.diagonal(), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found, found.T)


def test_minibatches_come_to_what_the_whole_set_has() -> None:
    x = features(2048, 6)
    y = x + 0.5 * features(2048, 6, seed=1)
    cka = MinibatchCka()
    for some in torch.arange(2048).split(32):
        cka.update([gram(x[some]), gram(y[some])])
    assert cka.compute()[0, 1].item() == pytest.approx(linear_cka(x, y), abs=0.02)


def test_evolution() -> None:
    blocks = [features(32, 10, seed=seed) for seed in range(4)]
    found = evolution([gram(block) for block in blocks])
    expected = [linear_cka(block, blocks[-1]) / linear_cka(blocks[0], blocks[-1]) for block in blocks]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert found[0] == 1
    assert evolution([gram(torch.ones(8, 2))] * 2).isnan().all()  # nothing evolves where nothing differs


def test_few_images_draw_the_plain_estimate_to_one_and_scatter_the_unbiased_one() -> None:
    """Of features that have nothing in common, far wider than there are images."""
    plain, scatter = {}, {}
    for images in (4, 32):
        pairs = [(features(images, 4096, seed=2 * i), features(images, 4096, seed=2 * i + 1)) for i in range(50)]
        plain[images] = min(linear_cka(x, y) for x, y in pairs)
        found = []
        for x, y in pairs:
            cka = MinibatchCka()
            cka.update([gram(x), gram(y)])
            found.append(cka.compute()[0, 1])
        scatter[images] = torch.stack(found)
    assert min(plain.values()) > 0.95
    assert scatter[4].std() > 0.4
    assert scatter[32].std() < 0.1
    assert scatter[32].mean().abs() < 0.05
