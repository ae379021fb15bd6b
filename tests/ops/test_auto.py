"""What `auto` picks, what it says, and that models keep their outputs whatever was picked."""

import importlib
import logging

import pytest
import torch
import torch.nn.functional as F
from kernels_here import on_gpu
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from vitrefine.errors import UserError
from vitrefine.ops import attention_statistics, centred_gram, choice, mean_cosine, relative_attention
from vitrefine.ops.deformable_merge import deformable_merge
from vitrefine.ops.official_refine import OfficialMix, official_refine
from vitrefine.ops.official_refine_training import Norm, TrainedMix, official_refine_training
from vitrefine.ops.refined_attention import Mix, _choose, refined_attention, refined_attention_and_maps


def on_cuda(shape, dtype=torch.bfloat16):
    """A tensor that only says it lives on a GPU."""
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        return torch.empty(shape, device="cuda:0", dtype=dtype)


def pick(mix, shape=(64, 12, 197, 32), dtype=torch.bfloat16, **options):
    q = on_cuda(shape, dtype)
    return _choose(q, q, mix, **{"attn_mask": None, "dropout_p": 0.0, "grid": None, **options})


@pytest.fixture
def hopper(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "_device_runs", lambda index, capability: capability <= choice.HOPPER)


FULL = Mix(torch.eye(12).repeat(3, 1), torch.ones(36, 3, 3), torch.ones(12, 36))
LOCAL = Mix(local=torch.ones(12, 3, 3))


@pytest.mark.usefixtures("hopper")
def test_picks_by_type_size_and_kind():
    assert pick(FULL) == "triton"
    assert pick(FULL, dtype=torch.float32) == "collapsed"
    assert pick(FULL, (1, 12, 50, 32)) == "collapsed"
    assert pick(FULL, grid=(14, 14)) == "collapsed"
    assert pick(Mix(torch.ones(40, 12)), (64, 12, 197, 32)) == "collapsed", "more maps than the kernels hold"
    assert pick(LOCAL) == "triton"
    assert pick(LOCAL, (16, 12, 785, 32)) == "sdpa"
    assert pick(LOCAL, (16, 12, 785, 32), dropout_p=0.1) == "triton"
    assert pick(LOCAL, (16, 12, 785, 32), attn_mask=torch.ones(785, 785, dtype=torch.bool)) == "triton"


class Attends(torch.nn.Module):
    def __init__(self, relative):
        super().__init__()
        self.relative = relative

    def forward(self, q, weights):
        return relative_attention(q, q, q, weights, (26, 20)) if self.relative else refined_attention(q, q, q, weights)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("relative", [False, True])
def test_a_program_for_batches_of_any_size_depends_on_none(relative, batch):
    """The kernels for relative attention take any batch as they are; those for refined attention look at its size."""
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        half = {"device": "cuda:0", "dtype": torch.bfloat16}
        q = torch.empty(batch, 12, 26 * 20, 32, **half)
        weights = torch.empty(12, 51, 39, **half) if relative else Mix(torch.empty(12, 12, **half))
    shapes = ({0: torch.export.Dim("batch", min=1, max=4096)}, None if relative else Mix(None, None, None))
    program = torch.export.export(Attends(relative), (q, weights), dynamic_shapes=shapes)
    ours = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("vitrefine")]
    assert ours == ["vitrefine.relative_attention.default"] * relative
    of_one_size = torch.export.export(Attends(relative), (q, weights))
    assert any(str(node.target).startswith("vitrefine") for node in of_one_size.graph.nodes)


def test_says_once_what_it_falls_back_to(monkeypatch, caplog):
    monkeypatch.setattr(choice, "_device_runs", lambda index, capability: False)
    choice._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="vitrefine.ops"):
        assert [pick(FULL) for _ in range(3)] == ["collapsed"] * 3
    assert len(caplog.records) == 1
    assert "convolves whole maps" in caplog.text


def test_nothing_is_said_or_changed_on_a_cpu(caplog):
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    mix = Mix(torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64))
    assert refined_attention(q, k, v, mix).equal(refined_attention(q, k, v, mix, impl="collapsed"))
    x, offset, weight = torch.randn(1, 4, 4, 3), torch.randn(1, 8, 2, 2), torch.randn(5, 3, 2, 2)
    assert deformable_merge(x, offset, weight).equal(deformable_merge(x, offset, weight, impl="reference"))
    assert not caplog.records


ONES, NORM = torch.ones(2), Norm(torch.ones(2), torch.ones(2))
MAPS, WEIGHTS, KERNELS = torch.rand(1, 2, 4, 4), torch.ones(2, 2), torch.ones(2, 3, 3)
BY_KERNELS = {
    "refined_attention": lambda: refined_attention(MAPS, MAPS, MAPS, Mix(WEIGHTS), impl="triton"),
    "refined_attention_and_maps": lambda: refined_attention_and_maps(MAPS, MAPS, MAPS, Mix(WEIGHTS), impl="triton"),
    "relative_attention": lambda: relative_attention(MAPS, MAPS, MAPS, KERNELS, (2, 2), impl="triton"),
    "deformable_merge": lambda: deformable_merge(MAPS, torch.ones(1, 8, 1, 2), torch.ones(3, 4, 2, 2), impl="triton"),
    "attention_statistics": lambda: attention_statistics(MAPS, MAPS, impl="triton"),
    "mean_cosine": lambda: mean_cosine(MAPS[0], impl="triton"),
    "centred_gram": lambda: centred_gram(MAPS[0], impl="triton"),
    "official_refine": lambda: official_refine(
        MAPS, OfficialMix(WEIGHTS, ONES, KERNELS, ONES, WEIGHTS, ONES, ONES), impl="triton"
    ),
    "official_refine_training": lambda: official_refine_training(
        MAPS, TrainedMix(WEIGHTS, NORM, KERNELS, NORM, WEIGHTS, NORM), impl="triton"
    ),
}


@pytest.mark.parametrize("name", BY_KERNELS)
def test_kernels_are_refused_without_a_gpu(name):
    with pytest.raises(UserError, match="impl='triton' needs a GPU, not tensors on cpu; use impl="):
        BY_KERNELS[name]()


def test_folding_ignores_autocast():
    mix = Mix(torch.randn(6, 3), torch.randn(6, 3, 3), torch.randn(3, 6))
    exact = mix.fold()
    with torch.autocast("cpu", torch.bfloat16):
        assert mix.fold().equal(exact)
        assert mix.fold().dtype == torch.float32


def models():
    from timm import create_model

    import vitrefine.models  # noqa: F401  registers them

    small = {"embed_dim": 192, "depth": 4, "num_heads": 6, "num_classes": 10}
    yield "paper", create_model("refined_vit_s", variant="paper", **small)
    yield "unshared", create_model("refined_vit_s", variant="paper", share=0, **small)
    yield "official", create_model("refined_vit_s", refine_own=True, **small)
    yield "lit", create_model("lit_s", depths=(1, 1, 2, 1), num_classes=10)


@on_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["paper", "unshared", "official", "lit"])
def test_models_keep_their_outputs(name, compiled):
    """bfloat16 with kernels against float64 without, at a size where they are picked; and as one graph."""
    torch.manual_seed(0)
    model = dict(models())[name].cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    x = torch.randn(8, 3, 224, 224, device="cuda")
    exact = model.double()
    truth = exact(x.double())
    exact_grads = torch.autograd.grad(truth.square().sum(), list(exact.parameters()), allow_unused=True)
    truth, exact_grads = truth.detach(), [None if g is None else g.clone() for g in exact_grads]
    model.float()
    run = torch.compile(model, fullgraph=True) if compiled else model
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            out = run(x)
        assert (out.double() - truth).norm() / truth.norm() < 3e-2
        if name == "official" and compiled:
            return  # whose backward pass has no kernel, and takes long to compile
        loss = run(x).float().square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    flat, exact_flat = (
        torch.cat([g.flatten().double() for g in some if g is not None]) for some in (grads, exact_grads)
    )
    assert F.cosine_similarity(flat, exact_flat, dim=0) > 0.99


@on_gpu
def test_a_model_learns_alike_with_kernels_and_without(monkeypatch):
    """A small Refined-ViT that shares maps, bfloat16 autocast, learning a batch by heart."""
    import timm

    import vitrefine.models  # noqa: F401  registers it

    torch.manual_seed(0)
    x, labels = torch.randn(16, 3, 64, 64, device="cuda"), torch.arange(16, device="cuda") % 10
    small = {"img_size": 64, "embed_dim": 192, "depth": 4, "num_heads": 6, "num_classes": 10}
    monkeypatch.setattr(importlib.import_module("vitrefine.ops.refined_attention"), "FEWEST_PAIRS", 0)

    def curve():
        torch.manual_seed(0)
        model = timm.create_model("refined_vit_s", variant="paper", **small).cuda()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(25):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses)

    ours = curve()
    monkeypatch.setattr("vitrefine.ops.choice._device_runs", lambda index, capability: False)
    expected = curve()
    assert ours[-5:].mean() < 0.7 * ours[0]
    assert (ours - expected).abs().mean() < 0.1 * ours[0]
