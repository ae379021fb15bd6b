"""The authors' refinement in training: the specification against their modules, and the kernels against both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_here import DEVICE, on_gpu, runs_interpreter, runs_kernels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrefine.errors import UserError
from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.official_training import refine_and_learn
from vitrefine.ops import official_refine_training as ops
from vitrefine.ops.choice import HALF
from vitrefine.ops.official_refine_training import Norm, TrainedMix, official_refine_training

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1e-2}
# Rounding moves one pixel in 10⁴ across a corner of relu6, where gradients change: those of noise feel the root of it.
GRADIENT_TOLERANCE = {**TOLERANCE, torch.float16: 3e-2, torch.bfloat16: 3e-2}
FACTOR = 0.4
CANCELLING = ("0.reduce_norm.bias", "1.bias")  # a norm takes every mean away; a gradient may have none


@runs_interpreter
def test_in_the_interpreter(interpret: Callable[..., None]) -> None:
    interpret(__file__, "-k", "kernel")


def refiner(heads: int, ratio: int, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Norms whose outputs lie on both sides of zero and of six."""
    torch.manual_seed(0)
    module = nn.Sequential(OfficialRefiner(heads, expansion=ratio), nn.BatchNorm2d(heads, momentum=0.3, eps=1e-3))
    module[0].local_norm.eps = 1e-4
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, std=3)
            nn.init.normal_(norm.bias, mean=1, std=2)
    return module.to(DEVICE, dtype)


def draw(batch: int, heads: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Maps, and a gradient; one head hardly varies."""
    torch.manual_seed(1)
    maps, grad = torch.randn(2, batch, heads, rows, columns, device=DEVICE)
    maps = (3 * maps).softmax(-1)
    maps[:, 1] = 0.3 + 1e-4 * maps[:, 1]
    return maps.to(dtype), grad.to(dtype)


def refine(module: Any, maps: Tensor, impl: str) -> Tensor:
    return refine_and_learn(maps, module[0], module[1], FACTOR, impl=impl)


def learn(module: nn.Sequential, maps: Tensor, grad: Tensor, impl: str | None) -> dict[str, Tensor]:
    """Result, gradients and running statistics; of the modules themselves without `impl`."""
    maps = maps.detach().requires_grad_()
    out = FACTOR * module(maps) if impl is None else refine(module, maps, impl)
    names, weights = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, [maps, *weights], grad.to(out.dtype))
    found = {"out": out.detach(), "maps": grads[0], **dict(zip(names, grads[1:], strict=True))}
    return found | {name: tensor.clone() for name, tensor in module.named_buffers()}


def distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).norm().item()


def compare(
    found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, plain: dict[str, Tensor] | None = None
) -> None:
    """Assert that all is near what is exact.

    A weight's gradient sums over all pixels, and what it sums may nearly cancel: then no computation that rounds to
    half precision comes near it, and it need not come nearer than `plain` does, the modules in that precision.
    """
    for name, tensor in found.items():
        error, size = distance(tensor, exact[name]), exact[name].double().norm().item()
        if name.endswith("num_batches_tracked"):
            assert tensor.equal(exact[name])
        elif name.endswith(("_mean", "_var")):
            assert error <= min(TOLERANCE[dtype], 1e-3) * size, name
        elif name in ("out", "maps"):
            most = TOLERANCE if name == "out" else GRADIENT_TOLERANCE
            assert error <= most[dtype] * size, f"{name} {error / size:.1e}"
        else:
            if (
                name in CANCELLING
            ):  # the weight beside a bias has a gradient of the same sum, times numbers of unit size
                size = max(size, exact[name.replace("bias", "weight")].norm().item())
            most = max(GRADIENT_TOLERANCE[dtype] * size, 0.0 if plain is None else distance(plain[name], exact[name]))
            assert error <= most, f"{name} {error / size:.1e}, allowed {most / size:.1e}"


def check(
    batch: int, heads: int, ratio: int, rows: int, columns: int, impl: str, dtype: torch.dtype, *, centred: bool = False
) -> None:
    maps, grad = draw(batch, heads, rows, columns, dtype)
    if centred:
        grad -= grad.mean((0, 2, 3), keepdim=True)
    exact = learn(refiner(heads, ratio, dtype=torch.float64), maps.double(), grad.double(), None)
    found, plain = learn(refiner(heads, ratio), maps, grad, impl), None
    assert found["out"].dtype == dtype
    assert found["maps"].dtype == dtype
    if dtype in HALF:
        with torch.autocast(DEVICE, dtype):
            plain = learn(refiner(heads, ratio), maps, grad, None)
    compare(found, exact, dtype, plain)


@pytest.mark.parametrize("ratio", [1, 3])
def test_specification_is_what_the_modules_do(ratio: int) -> None:
    maps, grad = draw(2, 3, 7, 5, torch.float64)
    found, exact = (learn(refiner(3, ratio, dtype=torch.float64), maps, grad, impl) for impl in ("reference", None))
    compare(found, exact, torch.float64)


CASES = [(2, 3, 3, 5, 5), (1, 3, 1, 17, 17), (3, 3, 2, 5, 17), (1, 12, 3, 17, 5), (1, 12, 1, 7, 7), (1, 3, 3, 33, 33)]


@runs_kernels
@pytest.mark.parametrize(("batch", "heads", "ratio", "rows", "columns"), CASES)
def test_kernels_do_what_the_modules_do(batch: int, heads: int, ratio: int, rows: int, columns: int) -> None:
    check(batch, heads, ratio, rows, columns, "triton", torch.float32)


@runs_kernels
def test_kernels_bear_a_gradient_that_cancels() -> None:
    check(2, 3, 3, 9, 7, "triton", torch.float32, centred=True)


@runs_kernels
def test_kernels_follow_autocast() -> None:
    """Maps in float32, as a softmax leaves them, are refined in half precision; gradients are in float32 again."""
    maps, grad = draw(2, 3, 9, 7)
    exact = learn(refiner(3, 3, dtype=torch.float64), maps.double(), grad.double(), None)
    with torch.autocast(DEVICE, torch.float16):
        found, plain = (learn(refiner(3, 3), maps, grad, impl) for impl in ("triton", None))
    assert found["out"].dtype == torch.float16
    assert all(tensor.dtype == torch.float32 for name, tensor in found.items() if name == "maps" or "weight" in name)
    compare(found, exact, torch.float16, plain)


@runs_kernels
@pytest.mark.parametrize("reentrant", [False, True])
def test_kernels_bear_checkpoints(reentrant: bool) -> None:
    maps, grad = draw(2, 3, 6, 5)
    plain, module, leaf = learn(refiner(3, 3), maps, grad, "triton"), refiner(3, 3), maps.detach().requires_grad_()
    out = checkpoint(lambda m: refine(module, m, "triton"), leaf, use_reentrant=reentrant)
    out.backward(grad)
    assert out.equal(plain["out"])
    assert leaf.grad is not None
    assert leaf.grad.equal(plain["maps"])
    assert all(weight.grad is not None and weight.grad.equal(plain[name]) for name, weight in module.named_parameters())


@runs_kernels
@pytest.mark.parametrize("batch", [1, 3])
def test_kernels_work_in_bands(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory for little: single images, or some rows of one."""
    from vitrefine.ops.kernels import official_refine_training_call as call

    monkeypatch.setattr(call, "LEAST_ROOM", 16 << 10 if batch > 1 else 0)  # some images; some rows
    bands = call.bands
    seen: list[int] = []

    def recorded(*sizes: int) -> Any:
        found = list(bands(*sizes))
        seen.append(len(found))
        return found

    monkeypatch.setattr(call, "bands", recorded)
    check(batch, 3, 3, 9, 7, "triton", torch.float32)
    assert min(seen) > 1


def mix_of(heads: int, hidden: int, *, last: bool) -> TrainedMix:
    torch.manual_seed(2)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, requires_grad=True)

    def norm(channels: int) -> Norm:
        return Norm(weight(channels), weight(channels))

    ends = norm(heads) if last else None
    return TrainedMix(
        weight(hidden, heads),
        norm(hidden),
        weight(hidden, 3, 3),
        norm(hidden),
        weight(heads, hidden),
        norm(heads),
        ends,
    )


@runs_kernels
def test_kernels_do_without_a_last_norm() -> None:
    (maps, grad), mix = draw(2, 3, 6, 5), mix_of(3, 6, last=False)
    leaves = [maps.requires_grad_(), mix.expand, *mix.reduce_norm[:2], mix.local]
    found, exact = [], []
    for results, impl in ((found, "triton"), (exact, "reference")):
        out, moments = official_refine_training(maps, mix, impl=impl)
        assert moments.last is None
        results += [out, *torch.autograd.grad(out, leaves, grad)]
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@runs_kernels
def test_kernels_repeat_their_bits() -> None:
    maps, grad = draw(2, 3, 9, 5)
    once, again = (learn(refiner(3, 3), maps, grad, "triton") for _ in range(2))
    assert all(tensor.equal(again[name]) for name, tensor in once.items())


@runs_kernels
def test_kernels_take_any_strides() -> None:
    maps, grad = draw(2, 3, 6, 7)
    plain = learn(refiner(3, 3), maps, grad, "triton")
    strided = learn(refiner(3, 3), maps.mT.contiguous().mT, grad.mT.contiguous().mT, "triton")
    assert all(tensor.equal(strided[name]) for name, tensor in plain.items())
    apart = torch.full((2, 3, 6, 16), torch.nan, device=DEVICE)[..., :7].copy_(maps)
    strided = learn(refiner(3, 3), apart, grad.sum().expand_as(grad), "triton")
    assert all(tensor.isfinite().all() for tensor in strided.values())


@runs_kernels
def test_kernels_compile_whole() -> None:
    maps, grad = draw(2, 3, 5, 5)
    module, compiled = refiner(3, 3), refiner(3, 3)
    plain = learn(module, maps, grad, "triton")
    leaf = maps.detach().requires_grad_()
    whole = torch.compile(lambda m: refine(compiled, m, "triton"), fullgraph=True)
    out = whole(leaf)
    torch.testing.assert_close(out, plain["out"])
    torch.testing.assert_close(torch.autograd.grad(out, leaf, grad)[0], plain["maps"])
    for name, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, plain[name])


@runs_kernels
def test_kernels_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(UserError, match="impl='reference'"):
        official_refine_training(torch.rand(1, 3, 4, 4, device=DEVICE), mix_of(3, 66, last=False), impl="triton")
    with pytest.raises(UserError, match="4097×4097"):
        official_refine_training(
            torch.rand(1, device=DEVICE).expand(1, 3, 4097, 4097), mix_of(3, 6, last=False), impl="triton"
        )
    with pytest.raises(UserError, match="float64"):
        official_refine_training(
            torch.rand(1, 3, 4, 4, device=DEVICE).double(), mix_of(3, 6, last=False), impl="triton"
        )


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(UserError, match="implementation"):
        official_refine_training(torch.rand(1, 3, 4, 4), mix_of(3, 6, last=False), impl="fast")


def test_auto_needs_a_gpu() -> None:
    assert not ops.kernels_serve(torch.rand(1, 3, 4, 4, dtype=torch.bfloat16), 9)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "ratio", "rows", "columns"), [(8, 12, 3, 197, 197), (2, 16, 3, 65, 257), (4, 12, 1, 99, 50)]
)
def test_kernels_at_model_shapes(
    batch: int, heads: int, ratio: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    check(batch, heads, ratio, rows, columns, "triton", dtype)
