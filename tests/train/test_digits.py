"""The recipe for digits, as a laptop runs it."""

import pytest
import torch

import vitrefine
from vitrefine.data.dataset import Place
from vitrefine.data.open import open_data
from vitrefine.train.objective import build_objective
from vitrefine.train.optimizer import build_optimizer
from vitrefine.train.recipe import load_recipe
from vitrefine.train.schedule import build_schedule

SMALL = "vit_tiny_patch16_224(img_size=32,patch_size=4,depth=4,embed_dim=64,num_heads=4)"
LIT = "lit_ti(img_size=32,depths=[1,1,2,1],embed_dims=[16,32,64,128],num_heads=[1,1,4,4])"


def accuracy(spec: str, epochs: int) -> float:
    """Trained for some of the recipe's epochs, tested on the digits held out."""
    torch.manual_seed(0)
    recipe, data = load_recipe("digits"), open_data("digits")
    place = Place(batch=recipe.per_process(1), rank=0, world=1, device=torch.device("cpu"), seed=0)
    model = vitrefine.create(spec, num_classes=10, **recipe.model_arguments())
    loader = data.train_loader(place, recipe.augment, recipe.data, (32, 32))
    optimizer = build_optimizer(model, recipe)
    schedule = build_schedule(optimizer, recipe, len(loader))
    objective = build_objective(recipe, model, 10, mean=data.mean, std=data.std)
    update = 0
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            optimizer.zero_grad()
            objective(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip_grad or float("inf"))
            optimizer.step()
            update += 1
            schedule.step_update(update)
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in data.test_loader(place, recipe.data, (32, 32)).epoch(0):
            right += int((model(batch.images).argmax(1) == batch.targets).sum())
    return right / data.test_images


def test_an_epoch_teaches_much() -> None:
    assert accuracy(LIT, epochs=1) > 0.5


@pytest.mark.full
@pytest.mark.parametrize("spec", [SMALL, SMALL + "+cb", SMALL + "+refiner", LIT])
def test_small_models_read_digits(spec: str) -> None:
    assert accuracy(spec, epochs=load_recipe("digits").epochs) > 0.95
