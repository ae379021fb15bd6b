"""Folded batch norms of the authors' refiner against the modules themselves."""

import pytest
import torch
from torch import nn

from vitrefine.layers import official_inference
from vitrefine.layers.official_inference import fold, refine_officially
from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.ops.official_refine import official_refine


def refiner(expansion: int) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(OfficialRefiner(4, expansion=expansion), nn.BatchNorm2d(4))
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.2, 0.9) if name.endswith("var") else tensor.normal_(std=0.7)
    return module.eval()


@pytest.mark.parametrize("expansion", [1, 3])
def test_folded_weights_give_what_the_modules_give(expansion: int) -> None:
    module, maps = refiner(expansion), torch.rand(2, 4, 5, 7)
    with torch.no_grad():
        folded = official_refine(maps, fold(module[0], module[1], 0.3), impl="reference")
        torch.testing.assert_close(folded, 0.3 * module(maps), rtol=1e-4, atol=1e-5)


def test_gradients_and_statistics_are_left_to_the_modules() -> None:
    module, maps = refiner(3), torch.rand(2, 4, 5, 7, requires_grad=True)
    torch.testing.assert_close(refine_officially(maps, module, 0.5), 0.5 * module(maps))
    assert refine_officially(maps, module).requires_grad
    before = module[1].running_mean.clone()
    with torch.no_grad():
        refine_officially(maps, module.train())
    assert not module[1].running_mean.equal(before)


def test_norms_of_several_processes_keep_their_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients but in training, they are not folded."""
    monkeypatch.setattr(official_inference, "kernel_serves", lambda maps, hidden: True)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(refiner(3).train())
    before = module[1].running_mean.clone()
    with torch.no_grad():
        refine_officially(torch.rand(2, 4, 5, 7), module)
    assert not module[1].running_mean.equal(before)


@pytest.mark.parametrize("expansion", [1, 3])
def test_norms_of_several_processes_fold_in_evaluation(expansion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official_inference, "kernel_serves", lambda maps, hidden: True)
    module, maps = refiner(expansion), torch.rand(2, 4, 5, 7)
    with torch.no_grad():
        expected = module(maps)
        found = refine_officially(maps, nn.SyncBatchNorm.convert_sync_batchnorm(module))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_norms_of_another_kind_are_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official_inference, "kernel_serves", lambda maps, hidden: True)
    module, maps = refiner(3), torch.rand(2, 4, 5, 7)
    module[0].local_norm = nn.GroupNorm(3, 12)
    with torch.no_grad():
        torch.testing.assert_close(refine_officially(maps, module, 0.5), 0.5 * module(maps))
