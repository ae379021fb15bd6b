"""Who sees which image when."""

import pytest
import torch

from vitrefine.data.dataset import Place
from vitrefine.data.order import held_out, order_of_testing, order_of_training, seed_of
from vitrefine.errors import UserError

CPU = torch.device("cpu")


def place(batch, rank=0, world=1, seed=7):
    return Place(batch, rank, world, CPU, seed)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("repeats", [1, 3])
def test_one_process_and_many_see_the_same_images_in_each_step(world, repeats):
    alone = order_of_training(101, 5, place(12), repeats)
    together = [order_of_training(101, 5, place(12 // world, rank, world), repeats) for rank in range(world)]
    assert alone.shape == (8, 12)
    assert torch.equal(torch.cat(together, dim=1).sort().values, alone.sort().values)
    if repeats == 1:
        assert torch.equal(torch.cat(together, dim=1), alone)


def test_an_epoch_shows_each_image_at_most_once_and_leaves_out_less_than_a_step():
    order = order_of_training(101, 0, place(12)).flatten()
    assert len(order.unique()) == len(order) == 96


def test_epochs_and_seeds_differ_and_repeat_themselves():
    first = order_of_training(50, 0, place(10))
    assert torch.equal(first, order_of_training(50, 0, place(10)))
    assert not torch.equal(first, order_of_training(50, 1, place(10)))
    assert not torch.equal(first, order_of_training(50, 0, place(10, seed=8)))
    assert len({seed_of(*parts) for parts in [(0, 1), (1, 0), (0, 0), (0, 1, 0), (0, 0, 1)]}) == 5


def test_repeats_go_to_different_ranks_in_the_same_step():
    ranks = [order_of_training(60, 0, place(5, rank, 3), repeats=3) for rank in range(3)]
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[0], ranks[2])
    assert torch.stack(ranks).unique().numel() == 20


@pytest.mark.parametrize("world", [1, 2, 7])
def test_testing_sees_each_image_once(world):
    seen = torch.cat([order_of_testing(23, place(4, rank, world)) for rank in range(world)])
    assert seen.sort().values.tolist() == list(range(23))


def test_a_batch_larger_than_the_set():
    with pytest.raises(UserError, match="20 training images do not fill one step of 32; make the batch smaller"):
        order_of_training(20, 0, place(16, 0, 2))


def test_the_share_of_each_class_is_held_out():
    labels = torch.arange(1000) % 10
    chosen = held_out(labels, 0.2)
    assert labels[chosen].bincount().tolist() == [20] * 10
    assert torch.equal(chosen, held_out(labels, 0.2))
    assert not held_out(labels, 0.0).any()


@pytest.mark.parametrize("share", [0.01, 0.999])
def test_a_share_that_leaves_nothing(share):
    few = torch.zeros(10) if share < 0.5 else torch.zeros(1)
    with pytest.raises(UserError, match="leaves one part empty; change the share"):
        held_out(few, share)
