"""Every sample exactly once an epoch, and as many steps on every rank: simulated, a whole cluster at a time."""

import numpy as np
import pytest
import torch

from vitrefine.data.dataset import Place
from vitrefine.data.sharding import (
    Stretch,
    pieces_of,
    shard_order,
    stretch_of_testing,
    stretch_of_training,
    worker_stretch,
)
from vitrefine.errors import UserError

CPU = torch.device("cpu")


def simulate(sizes, batch, world, workers, seed=0, epoch=0):
    """How often each sample of each shard is read in an epoch, and the batches that each worker makes."""
    line = int(np.sum(sizes))
    seen = [np.zeros(size, dtype=np.int64) for size in sizes]
    batches = np.zeros((world, workers), dtype=np.int64)
    order = shard_order(len(sizes), seed, epoch)
    opened = 0
    for rank in range(world):
        stretch = stretch_of_training(line, Place(batch, rank, world, CPU, seed))
        for worker in range(workers):
            part = worker_stretch(stretch, batch, worker, workers)
            assert len(part) % batch == 0
            batches[rank, worker] = len(part) // batch
            for piece in pieces_of(part, sizes, order):
                seen[piece.shard][piece.first : piece.stop] += 1
                opened += 1
    return seen, batches, opened


def test_1024_workers_over_10000_shards():
    sizes = np.random.default_rng(0).integers(1, 400, 10_000).tolist()
    world, workers, batch = 128, 8, 64
    seen, batches, opened = simulate(sizes, batch, world, workers)
    counts = np.concatenate(seen)
    steps = sum(sizes) // (batch * world)
    assert counts.max() == 1
    assert (counts == 0).sum() == sum(sizes) - steps * batch * world < batch * world
    assert (batches.sum(axis=1) == steps).all()
    assert batches.max() - batches.min() <= 1
    assert opened <= 10_000 + world * workers  # at most one shard more a worker than if none lay across a border


def test_what_one_epoch_leaves_out_comes_in_another():
    sizes = [7, 30, 2, 11, 25, 9, 14, 3]
    missed = [np.concatenate(simulate(sizes, 4, 4, 2, epoch=epoch)[0]) == 0 for epoch in range(30)]
    assert all(0 < one.sum() < 16 for one in missed)
    assert not np.logical_and.reduce(missed).any()


@pytest.mark.parametrize("sizes", [[100], [1] * 97, [0, 50, 0, 0, 47, 3], [1000, 1, 1, 1, 1], list(range(40))])
@pytest.mark.parametrize(("world", "workers", "batch"), [(1, 1, 7), (2, 3, 4), (3, 2, 5), (5, 4, 1)])
def test_uneven_shards(sizes, world, workers, batch):
    seen, batches, _ = simulate(sizes, batch, world, workers)
    counts = np.concatenate(seen)
    steps = sum(sizes) // (batch * world)
    assert counts.max() == 1
    assert counts.sum() == steps * batch * world
    assert (batches.sum(axis=1) == steps).all()
    # PyTorch asks workers in turn, so worker w must have the batches w, w + W, …
    assert (batches == [len(range(worker, steps, workers)) for worker in range(workers)]).all()


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (4, 3), (7, 2), (64, 16)])
def test_testing_reads_all_of_them_once(world, workers):
    sizes = [13, 0, 200, 41, 1, 78]
    seen = [np.zeros(size, dtype=np.int64) for size in sizes]
    for rank in range(world):
        stretch = stretch_of_testing(sum(sizes), Place(8, rank, world, CPU, 0))
        batches = -(-len(stretch) // 8)
        for worker in range(workers):
            part = worker_stretch(stretch, 8, worker, workers)
            assert -(-len(part) // 8) == len(range(worker, batches, workers))
            for piece in pieces_of(part, sizes, range(len(sizes))):
                seen[piece.shard][piece.first : piece.stop] += 1
    assert all((counts == 1).all() for counts in seen)


def test_the_order_is_of_seed_and_epoch():
    assert shard_order(50, 1, 2) == shard_order(50, 1, 2)
    assert len({tuple(shard_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sorted(shard_order(50, 1, 2)) == list(range(50))


def test_an_empty_stretch_has_no_pieces():
    assert pieces_of(Stretch(5, 5), [3, 4], [0, 1]) == []


def test_too_few_samples_for_a_step():
    with pytest.raises(UserError, match="30 training images do not fill one step of 32"):
        stretch_of_training(30, Place(16, 0, 2, CPU, 0))
