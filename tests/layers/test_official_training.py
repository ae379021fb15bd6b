"""When the authors' refiner learns by kernels, and that its norms remember what they would have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrefine.layers import official_inference, official_training
from vitrefine.layers.official_inference import refine_officially
from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.official_training import learns_by_kernels
from vitrefine.layers.refined_attention import OfficialRefinedAttention


def refiner(expansion: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(OfficialRefiner(4, expansion=expansion), nn.BatchNorm2d(4, momentum=0.2)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU were there; what is then computed without it is the specification."""
    monkeypatch.setattr(official_training, "kernels_serve", lambda maps, hidden: True)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("expansion", [1, 3])
def test_norms_remember_what_they_would_have(expansion: int) -> None:
    ours, theirs = refiner(expansion), refiner(expansion)
    for seed in range(3):
        torch.manual_seed(seed)
        maps = torch.rand(2, 4, 5, 7, dtype=torch.float64)
        torch.testing.assert_close(refine_officially(maps, ours, 0.5), 0.5 * theirs(maps))
    assert ours[1].num_batches_tracked == 3
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-6, atol=1e-7)


def freeze_one(module: nn.Sequential) -> nn.Sequential:
    module[0].local_norm.eval()
    return module


def average(module: nn.Sequential) -> nn.Sequential:
    module[1].momentum = None
    return module


def forget(module: nn.Sequential) -> nn.Sequential:
    module[0].reduce_norm = nn.BatchNorm2d(4, track_running_stats=False)
    return module


def leave_scale(module: nn.Sequential) -> nn.Sequential:
    module[1] = nn.BatchNorm2d(4, affine=False)
    return module


def normalise_otherwise(module: nn.Sequential) -> nn.Sequential:
    module[0].local_norm = nn.GroupNorm(3, 12)
    return module


def end_otherwise(module: nn.Sequential) -> nn.Sequential:
    module[1] = nn.Identity()
    return module


def be_dense(module: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(OfficialRefiner(4, dense=True), module[1])


def be_wide(module: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(OfficialRefiner(4, kernel_size=5), module[1])


def synchronise(module: nn.Sequential) -> nn.Sequential:
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)


CHANGES = [freeze_one, average, forget, leave_scale, normalise_otherwise, end_otherwise, be_dense, be_wide, synchronise]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("change", CHANGES)
def test_any_other_form_is_left_to_the_modules(change: Callable[[nn.Sequential], nn.Sequential]) -> None:
    maps = torch.rand(2, 4, 5, 7, dtype=torch.float64)
    assert learns_by_kernels(maps, *refiner())
    assert not learns_by_kernels(maps, *change(refiner()))
    assert not learns_by_kernels(maps, *refiner().eval())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each time that the kernels learn: whether gradients are wanted."""
    seen: list[bool] = []
    learn = official_inference.refine_and_learn

    def recorded(*arguments: Any) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return learn(*arguments)

    monkeypatch.setattr(official_inference, "refine_and_learn", recorded)
    return seen


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("shared", [False, True])
def test_attention_learns_by_kernels_in_training_alone(shared: bool, calls: list[bool]) -> None:
    """Also without gradients, so that a checkpoint's first pass and its second are the same."""
    attention = OfficialRefinedAttention(8, 4, shared=shared, refine_own=not shared, dtype=torch.float64)
    x, maps = torch.rand(2, 5, 8, dtype=torch.float64), torch.rand(2, 4, 5, 5, dtype=torch.float64)
    attention(x, maps)
    with torch.no_grad():
        attention(x, maps)
    assert calls == [True, False]
    attention.eval()(x, maps)
    with torch.no_grad():
        attention(x, maps)
    assert len(calls) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_learns_by_kernels_under_autocast(compiled: bool) -> None:
    """In bfloat16, against float64: what comes out, gradients, and what the norms remember; also as one graph."""
    x, grad = torch.randn(2, 4, 197, 96, device="cuda")
    maps = torch.randn(4, 12, 197, 197, device="cuda").softmax(-1).bfloat16().float()
    results: list[dict[str, Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        attention: Any = OfficialRefinedAttention(96, 12, shared=True).to("cuda", dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            assert learns_by_kernels(maps.to(dtype), *attention.refiner) == (dtype == torch.float32)
            run = torch.compile(attention, fullgraph=True) if compiled and dtype == torch.float32 else attention
            out, _ = run(x.to(dtype), maps.to(dtype))
        out.backward(grad.to(out.dtype))
        grads = {name: attention.get_parameter(name).grad for name in ("v.weight", "refiner.1.weight")}
        results.append({"out": out, **grads, **dict(attention.named_buffers())})
    found, exact = results
    for name, tensor in found.items():
        most = 5e-3 if "running" in name else 5e-2
        assert (tensor - exact[name]).double().norm() <= most * exact[name].double().norm(), name


@pytest.mark.usefixtures("served")
def test_the_choice_compiles_whole() -> None:
    module, twin, maps = refiner(), refiner(), torch.rand(2, 4, 5, 7, dtype=torch.float64)
    compiled = torch.compile(lambda m: refine_officially(m, module, 0.5), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(maps), 0.5 * twin(maps))
    torch.testing.assert_close(module[1].running_var, twin[1].running_var)


@pytest.mark.usefixtures("served")
def test_one_value_has_no_variance() -> None:
    with pytest.raises(ValueError, match="more than 1 value"):
        refine_officially(torch.rand(1, 4, 1, 1, dtype=torch.float64), refiner())


def test_nothing_is_served_without_a_gpu() -> None:
    assert not learns_by_kernels(torch.rand(2, 4, 5, 7, dtype=torch.bfloat16), *refiner())
