"""The learning rate of each update: timm's cosine schedule, counted in updates.

With a warm-up the cosine runs from the first update on and the line joins it, as in DeiT; offsets and layers that learn
at a share of the rate do so all the way.
"""

import torch
from timm.scheduler import CosineLRScheduler

from vitrefine.errors import UserError
from vitrefine.train.recipe import Recipe


def build_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, updates_per_epoch: int) -> CosineLRScheduler:
    """The schedule, which has set the rate of the first update; after the n-th call `step_update(n)`.

    Args:
        optimizer: Whose rates it sets.
        recipe: Its `schedule` and `epochs`.
        updates_per_epoch: Updates of the optimiser in an epoch.
    """
    if updates_per_epoch < 1:
        raise UserError(f"there are fewer training images than batch={recipe.batch}; lower batch")
    plan = recipe.schedule
    return CosineLRScheduler(
        optimizer,
        t_initial=(recipe.epochs - plan.cooldown_epochs) * updates_per_epoch,
        lr_min=plan.min_lr,
        warmup_t=round(plan.warmup_epochs * updates_per_epoch),
        warmup_lr_init=plan.warmup_lr,
        t_in_epochs=False,
    )
