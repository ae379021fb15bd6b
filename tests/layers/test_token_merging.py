"""Deformable token merging as a layer, and the optimiser groups of its offsets."""

from typing import Any

import pytest
import timm
import timm.optim
import torch
import torch.nn.functional as F
from timm.scheduler import CosineLRScheduler
from torch import nn
from torchvision.ops import deform_conv2d

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.layers.token_merging import DeformableTokenMerging, UniformTokenMerging, offset_param_groups


def merging(train: bool = False) -> DeformableTokenMerging:
    torch.manual_seed(0)
    module = DeformableTokenMerging(6, 10, dtype=torch.float64)
    nn.init.uniform_(module.norm.running_var, 0.5, 1.5)
    nn.init.normal_(module.norm.running_mean)
    return module.train(train)


def image() -> torch.Tensor:
    return torch.randn(2, 8, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("train", [False, True])
def test_starts_as_uniform_merging(train: bool) -> None:
    module, x = merging(train), image()
    assert module.sampling_offsets(x).eq(0).all()
    nchw = x.permute(0, 3, 1, 2)
    uniform = F.conv2d(nchw, module.merge.weight, module.merge.bias, stride=2)
    running = (module.norm.running_mean.clone(), module.norm.running_var.clone())
    uniform = F.gelu(F.batch_norm(uniform, *running, module.norm.weight, module.norm.bias, training=train))
    torch.testing.assert_close(module(x), uniform.permute(0, 2, 3, 1))


def test_follows_its_offsets() -> None:
    module, x = merging(), image()
    nn.init.normal_(module.offset.weight, std=0.3)
    nn.init.normal_(module.offset.bias)
    nchw = x.permute(0, 3, 1, 2).contiguous()
    offset = F.conv2d(nchw, module.offset.weight, module.offset.bias, stride=2)
    torch.testing.assert_close(module.sampling_offsets(x), offset)
    assert offset.shape == (2, 8, 4, 6)
    merged = deform_conv2d(nchw, offset, module.merge.weight, module.merge.bias, stride=2)
    torch.testing.assert_close(module(x), F.gelu(module.norm(merged)).permute(0, 2, 3, 1))


def test_offsets_learn_from_the_first_step() -> None:
    module = merging(train=True)
    (module(image()) * torch.randn(2, 4, 6, 10, dtype=torch.float64)).sum().backward()
    assert module.offset.weight.grad.abs().sum() > 0
    assert module.offset.bias.grad.abs().sum() > 0


def test_reset_returns_to_uniform() -> None:
    module = merging()
    nn.init.normal_(module.offset.weight)
    nn.init.normal_(module.offset.bias)
    module.reset_parameters()
    assert module.sampling_offsets(image()).eq(0).all()


def test_a_whole_model_starts_with_zero_offsets() -> None:
    small: dict[str, Any] = {"embed_dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
    model = timm.create_model("lit_ti", **small)
    offsets = [p for n, p in model.named_parameters() if ".offset." in n]
    assert len(offsets) == 6
    assert all(parameter.eq(0).all() for parameter in offsets)


def test_uniform_merging_by_the_book() -> None:
    module = UniformTokenMerging(6, 10, dtype=torch.float64)
    x = image()
    expected = F.conv2d(x.permute(0, 3, 1, 2), module.merge.weight, module.merge.bias, stride=2)
    torch.testing.assert_close(module(x), module.norm(expected.permute(0, 2, 3, 1)))


def small_lit() -> nn.Module:
    return timm.create_model("lit_s", embed_dims=(8, 8, 8, 8), depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2))


def ids(parameters: Any) -> set[int]:
    return {id(parameter) for parameter in parameters}


def offsets_of(model: nn.Module) -> set[int]:
    return ids(p for n, p in model.named_parameters() if ".merge.offset." in n)


def check_split(model: nn.Module, groups: list[dict[str, Any]], before: list[dict[str, Any]], scale: float) -> None:
    """Every parameter is there once, offsets apart; a group keeps what it said, but for the scale of offsets."""
    everything = [id(p) for group in groups for p in group["params"]]
    assert len(everything) == len(set(everything))
    assert set(everything) == ids(model.parameters())
    options = {id(p): {k: v for k, v in g.items() if k != "params"} for g in before for p in g["params"]}
    for group in groups:
        members = ids(group["params"])
        assert members <= offsets_of(model) or not members & offsets_of(model)
        for parameter in group["params"]:
            expected = dict(options[id(parameter)])
            if id(parameter) in offsets_of(model):
                expected["lr_scale"] = expected.get("lr_scale", 1.0) * scale
            assert {k: v for k, v in group.items() if k != "params"} == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["none", "weight_decay", "layer_decay"])
def test_groups_are_split(kind: str) -> None:
    model = small_lit()
    before: list[dict[str, Any]]
    if kind == "weight_decay":
        before = timm.optim.param_groups_weight_decay(model, 0.05)
    elif kind == "layer_decay":
        before = timm.optim.param_groups_layer_decay(model, 0.05, layer_decay=0.8)
    else:
        before = [{"params": list(model.parameters())}]
    groups = offset_param_groups(model, lr_scale=0.01, param_groups=None if kind == "none" else before)
    check_split(model, groups, before, 0.01)
    if kind == "none":
        assert [len(group["params"]) for group in groups] == [len(before[0]["params"]) - 6, 6]
    if kind == "layer_decay":
        scales = [group["lr_scale"] for group in groups if ids(group["params"]) <= offsets_of(model)]
        assert all(0 < scale < 0.01 for scale in scales)


def test_frozen_parameters_are_left_out() -> None:
    model = small_lit()
    model.patch_embed.requires_grad_(False)
    groups = offset_param_groups(model)
    assert not ids(model.patch_embed.parameters()) & {id(p) for group in groups for p in group["params"]}


def test_a_model_without_dtm_keeps_its_groups() -> None:
    model = nn.Linear(2, 3)
    assert offset_param_groups(model) == [{"params": [model.weight, model.bias]}]
    groups = [{"params": [model.weight], "lr_scale": 0.5}, {"params": [model.bias]}]
    assert offset_param_groups(model, param_groups=groups) == groups


def test_offsets_train_at_a_hundredth_through_timm() -> None:
    """The paper's 1e-5 beside 1e-3, with timm's optimiser and scheduler."""
    model = small_lit()
    groups = offset_param_groups(model, param_groups=timm.optim.param_groups_weight_decay(model, 0.05))
    optimizer = timm.optim.create_optimizer_v2(groups, opt="adamw", lr=1e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=10)
    scheduler.step(0)
    for group in optimizer.param_groups:
        expected = 1e-5 if ids(group["params"]) <= offsets_of(model) else 1e-3
        assert group["lr"] == pytest.approx(expected)
    scheduler.step(5)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert max(rates) == pytest.approx(100 * min(rates))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(torch.randn(2, 3, 224, 224)).square().sum().backward()
    optimizer.step()
    moved = {n: (p.detach() - before[n]).abs().max().item() for n, p in model.named_parameters()}
    assert 0 < moved["stages.1.merge.offset.weight"] < 0.02 * moved["stages.1.merge.merge.weight"]
