"""Learning rates against the formula, update by update."""

import json
import math

import pytest
import torch
from torch import nn

from vitrefine.errors import UserError
from vitrefine.train.recipe import Recipe, load_recipe
from vitrefine.train.schedule import build_schedule

UPDATES = 7  # an epoch


def rates(recipe: Recipe, start: int = 0, state: str | None = None) -> list[float]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=recipe.lr)
    schedule = build_schedule(optimizer, recipe, UPDATES)
    if state is not None:
        schedule.load_state_dict(json.loads(state))
        schedule.step_update(start)
    found = []
    for update in range(start, recipe.epochs * UPDATES):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(update + 1)
    return found


@pytest.mark.parametrize("warmup", [0, 0.5, 2])
@pytest.mark.parametrize("cooldown", [0, 3])
def test_line_then_cosine_then_flat(warmup: float, cooldown: int) -> None:
    recipe = load_recipe(
        "deit",
        ["epochs=10", f"schedule.warmup_epochs={warmup}", f"schedule.cooldown_epochs={cooldown}", "batch=512"],
    )
    top, start, low = 5e-4, 1e-6, 1e-5
    line, cosine = round(warmup * UPDATES), (10 - cooldown) * UPDATES
    for update, rate in enumerate(rates(recipe)):
        if update < line:
            expected = start + (top - start) * update / line
        elif update < cosine:
            expected = low + (top - low) * (1 + math.cos(math.pi * update / cosine)) / 2
        else:
            expected = low
        assert rate == pytest.approx(expected, rel=1e-12)


def test_a_schedule_goes_on_where_it_was() -> None:
    recipe = load_recipe("deit", ["epochs=10", "schedule.warmup_epochs=2"])
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=recipe.lr)
    state = json.dumps(build_schedule(optimizer, recipe, UPDATES).state_dict())
    assert rates(recipe, 30, state) == rates(recipe)[30:]


def test_no_update_an_epoch() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(UserError, match="fewer training images than batch=1024; lower batch"):
        build_schedule(optimizer, load_recipe("deit"), 0)
