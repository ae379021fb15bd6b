"""Which images come when: permutations, slices and seeds, all functions of their arguments alone."""

import numpy as np
import torch
from torch import Tensor

from vitrefine.data.dataset import Place
from vitrefine.errors import UserError

TEST_SHARE = 0.2  # of a set that comes without a test part
_HELD_OUT_SEED = 20210607  # the images held out are the same whatever a run's seed, so that runs can be paired


def seed_of(*parts: int) -> int:
    """A seed for each tuple of numbers; near tuples give unrelated seeds."""
    return int(np.random.SeedSequence((len(parts), *parts)).generate_state(1, np.uint64)[0] >> 1)


def generator_of(*parts: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that starts from these numbers."""
    return torch.Generator(device).manual_seed(seed_of(*parts))


def steps_per_epoch(images: int, place: Place) -> int:
    """Whole steps in an epoch."""
    steps = images // (place.batch * place.world)
    if steps == 0:
        raise UserError(
            f"{images} training images do not fill one step of {place.batch * place.world}; make the batch smaller"
        )
    return steps


def order_of_training(images: int, epoch: int, place: Place, repeats: int = 1) -> Tensor:
    """Numbers (steps, batch) of the images that this process takes in an epoch.

    With repeats, as DeiT does it, each image comes that often in a row, its copies go to different ranks, and the
    epoch ends after as many samples as there are images.
    """
    steps = steps_per_epoch(images, place)
    order = torch.randperm(images, generator=generator_of(place.seed, epoch))
    if repeats == 1:
        step_rank_batch = order[: steps * place.batch * place.world].view(steps, place.world, place.batch)
        return step_rank_batch[:, place.rank]
    order = order[: -(-images // repeats)].repeat_interleave(repeats)
    return order[: steps * place.batch * place.world].view(steps, place.batch, place.world)[:, :, place.rank]


def order_of_testing(images: int, place: Place) -> Tensor:
    """Numbers of the images that this process tests."""
    return torch.arange(place.rank, images, place.world)


def held_out(labels: Tensor, share: float) -> Tensor:
    """Which images (N,) are held out: the given share of every class, always the same ones."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    shuffled = torch.randperm(len(labels), generator=generator_of(_HELD_OUT_SEED))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    reached = torch.arange(len(labels) + 1, dtype=torch.float64).mul(share).add(1e-9).floor()
    chosen[by_class] = reached.diff() > 0
    if share > 0 and not 0 < int(chosen.sum()) < len(labels):
        raise UserError(
            f"a validation share of {share} of {len(labels)} images leaves one part empty; change the share"
        )
    return chosen


def kept_for_testing(labels: Tensor, name: str) -> Tensor:
    """Which images (N,) of a set without a test part are for testing."""
    if int(len(labels) * TEST_SHARE) == 0:
        raise UserError(f"{name} has too few images ({len(labels)}) to keep a fifth for testing; add some")
    return held_out(labels, TEST_SHARE)
