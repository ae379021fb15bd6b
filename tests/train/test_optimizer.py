"""Parameter groups: what decays, what learns slowly, and that nothing is lost or taken twice."""

import copy
from typing import Any

import pytest
import timm.optim
import torch
import torchvision
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

import vitrefine
from vitrefine.errors import UserError
from vitrefine.train.muon import Muon
from vitrefine.train.optimizer import build_optimizer, parameter_groups
from vitrefine.train.recipe import Recipe, load_recipe
from vitrefine.train.schedule import build_schedule

TINY = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=48,num_heads=3)"
LIT = "lit_ti(img_size=64,depths=[1,1,1,1],embed_dims=[16,16,32,32],num_heads=[1,1,2,2],num_classes=4)"


def recipe(*overrides: str) -> Recipe:
    return load_recipe("deit", overrides)


def names_by(model: nn.Module, groups: list[dict[str, Any]], key: str) -> dict[Any, set[str]]:
    """The names of parameters, by a value of their groups; each parameter must be in one group."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[Any, set[str]] = {}
    for group in groups:
        for parameter in group["params"]:
            found.setdefault(group.get(key, 1.0), set()).add(names.pop(id(parameter)))
    assert not names, f"left out: {names.values()}"
    return found


def test_matrices_decay_and_the_rest_does_not() -> None:
    model = vitrefine.create(TINY + "+cb_s+refiner", num_classes=4)
    decay = names_by(model, parameter_groups(model, recipe()), "weight_decay")
    assert decay.keys() == {0.0, 0.05}
    assert all(parameter.ndim > 1 for name, parameter in model.named_parameters() if name in decay[0.05])
    assert {"cls_token", "pos_embed", "norm.weight", "norm.bias", "head.bias"} <= decay[0.0]
    scales = {name for name in decay[0.0] if name.endswith("broadcast.scale")}
    assert len(scales) == 2
    assert {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "head.weight"} <= decay[0.05]
    assert any("refiner" in name for name in decay[0.05])


def test_tokens_and_positions_of_other_libraries_do_not_decay() -> None:
    model = vitrefine.create("torchvision:vit_b_16", num_classes=4)
    decay = names_by(model, parameter_groups(model, recipe()), "weight_decay")
    assert {"class_token", "encoder.pos_embedding"} <= decay[0.0]


def test_offsets_learn_slowly_all_the_way() -> None:
    model = vitrefine.create(LIT)
    settings = load_recipe("lit_ti", ["epochs=10", "schedule.warmup_epochs=2"])
    optimizer = build_optimizer(model, settings)
    scales = names_by(model, optimizer.param_groups, "lr_scale")
    assert scales.keys() == {1.0, 0.01}
    assert {name.rsplit(".", 2)[-2] for name in scales[0.01]} == {"offset"}
    assert len(scales[0.01]) == 6  # weight and bias of three mergings
    schedule = build_schedule(optimizer, settings, updates_per_epoch=10)
    rates = []
    for update in range(1, 101):
        (slow,) = {group["lr"] for group in optimizer.param_groups if group.get("lr_scale") == 0.01}
        (usual,) = {group["lr"] for group in optimizer.param_groups if "lr_scale" not in group}
        assert slow == pytest.approx(0.01 * usual)
        rates.append(usual)
        schedule.step_update(update)
    assert max(rates) == pytest.approx(1e-3, rel=0.1)


def test_offsets_are_slow_unless_told_otherwise() -> None:
    model = vitrefine.create(LIT)
    assert names_by(model, parameter_groups(model, recipe()), "lr_scale").keys() == {1.0, 0.01}
    assert names_by(model, parameter_groups(model, recipe("optim.offset_lr_ratio=1")), "lr_scale").keys() == {1.0}


def test_tokens_of_transformers_do_not_decay() -> None:
    config = Dinov2WithRegistersConfig(image_size=32, patch_size=8, hidden_size=24, num_hidden_layers=1)
    model = Dinov2WithRegistersModel(config)
    decay = names_by(model, parameter_groups(model, recipe()), "weight_decay")
    tokens = {f"embeddings.{name}" for name in ("cls_token", "mask_token", "register_tokens", "position_embeddings")}
    assert tokens <= decay[0.0]


def test_layer_decay_is_refused_where_it_would_do_nothing() -> None:
    model = torchvision.models.VisionTransformer(32, 8, 2, 3, 12, 16)
    with pytest.raises(UserError, match=r"layer_decay needs a model that tells its layers apart.*VisionTransformer"):
        parameter_groups(model, recipe("optim.layer_decay=0.5"))


def test_layer_decay_multiplies_with_the_offsets_ratio() -> None:
    model = vitrefine.create(TINY, num_classes=4)
    scales = names_by(model, parameter_groups(model, recipe("optim.layer_decay=0.5")), "lr_scale")
    assert "head.weight" in scales[1.0]
    assert "blocks.1.mlp.fc1.weight" in scales[0.5]
    assert "blocks.0.mlp.fc1.weight" in scales[0.25]
    assert "patch_embed.proj.weight" in scales[0.125]

    lit = vitrefine.create(LIT)
    plain = names_by(lit, parameter_groups(lit, recipe("optim.layer_decay=0.5", "optim.offset_lr_ratio=1")), "lr_scale")
    both = names_by(
        lit, parameter_groups(lit, recipe("optim.layer_decay=0.5", "optim.offset_lr_ratio=0.1")), "lr_scale"
    )
    before = {name: scale for scale, names in plain.items() for name in names}
    after = {name: scale for scale, names in both.items() for name in names}
    assert all(after[n] == pytest.approx(before[n] * (0.1 if ".offset." in n else 1)) for n in before)


def test_frozen_parameters_stay_out() -> None:
    model = vitrefine.create(TINY, num_classes=4)
    model.patch_embed.requires_grad_(False)
    held = {id(p) for group in parameter_groups(model, recipe()) for p in group["params"]}
    assert not held & {id(p) for p in model.patch_embed.parameters()}
    with pytest.raises(UserError, match="no parameter that could learn"):
        build_optimizer(model.requires_grad_(False), recipe())


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon", "lion"])
def test_timms_optimisers_learn(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    cleared = ["optim.betas=null", "optim.eps=null", "optim.lr_batch=null", "schedule.min_lr=0"]
    optimizer = build_optimizer(model, recipe(f"optim.name={name}", "optim.lr=0.01", *cleared))
    x = torch.randn(16, 4)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_arguments_reach_the_optimiser() -> None:
    model = vitrefine.create(TINY, num_classes=4)
    optimizer = build_optimizer(model, recipe("optim.betas=[0.8, 0.95]", "optim.eps=1e-6", "batch=512"))
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.95), 1e-6, 5e-4)
        assert group["fused"]


def test_muon_is_timms_in_larger_kernels() -> None:
    torch.manual_seed(0)
    model = vitrefine.create(TINY + "+refiner", num_classes=10)
    twin = copy.deepcopy(model)
    settings = recipe("optim.name=muon", "optim.lr=2e-3", "optim.lr_batch=null")
    ours = build_optimizer(model, settings)
    said = {**settings.optim.arguments(), "lr": 2e-3, "weight_decay": 0.05}
    theirs = timm.optim.Muon(parameter_groups(twin, settings), **said, ns_coefficients="original")
    for step in range(4):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if step or p.shape[0] != 10:  # a parameter may have no gradient yet
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    mine, other = (optimizer.state_dict()["state"] for optimizer in (ours, theirs))
    for key, state in mine.items():
        assert {*state, "use_muon"} == {*other[key]}


def test_muon_takes_a_closure() -> None:
    model = nn.Linear(8, 8)
    optimizer = Muon(model.parameters(), lr=1e-2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(2, 8)).square().sum()
        value.backward()
        return value

    losses = [optimizer.step(loss).item() for _ in range(20)]
    assert losses[-1] < losses[0]


def accepted() -> list[str]:
    """The optimisers that a recipe may name, one of each class."""
    names: dict[Any, str] = {}
    for name in map(str, timm.optim.list_optimizers()):
        try:
            recipe(f"optim.name={name}", "optim.eps=null", "optim.betas=null")
        except UserError:
            continue
        names.setdefault(timm.optim.get_optimizer_info(name).opt_class, name)
    return [name for name in names.values() if not name.startswith(("bnb", "fused", "kron"))]  # kron compiles


@pytest.mark.parametrize("name", accepted())
def test_optimisers_that_a_recipe_may_name_can_be_continued(name: str) -> None:
    settings = recipe(f"optim.name={name}", "optim.eps=null", "optim.betas=null")
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))]
    optimizers = [build_optimizer(models[0], settings)]

    def step(number: int) -> None:
        models[number](torch.ones(2, 6)).square().sum().backward()
        optimizers[number].step()
        optimizers[number].zero_grad()

    step(0)
    models.append(copy.deepcopy(models[0]))
    optimizers.append(build_optimizer(models[1], settings))
    saved = get_optimizer_state_dict(models[0], optimizers[0])
    set_optimizer_state_dict(models[1], optimizers[1], copy.deepcopy(saved))
    for number in (0, 1):
        torch.manual_seed(1)
        step(number)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_an_optimiser_that_cannot_be_made_here() -> None:
    with pytest.raises(UserError, match=r"the optimiser fusedadam cannot be made here \(.*; set optim.name=adamw"):
        build_optimizer(nn.Linear(6, 8), recipe("optim.name=fusedadam"))
