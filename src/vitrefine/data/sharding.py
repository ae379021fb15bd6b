"""Dealing shards to ranks and their worker processes: arithmetic alone, no files.

The shards of an epoch, put one behind the other in that epoch's order, make a line of N samples. With G = batch × world
and S = ⌊N / G⌋ steps, rank r takes the samples [r·S·batch, (r+1)·S·batch) of the line: as many as every other rank,
whatever the sizes of the shards. Worker w of W makes the batches of steps w, w + W, …, which is the order in which
PyTorch asks its workers, out of a run of that stretch of its own. A shard that lies across a border is opened by both
sides, and each takes its part. So every sample is dealt once, less the last N − S·G that do not fill a step; those
differ from epoch to epoch with the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vitrefine.data.dataset import Place
from vitrefine.data.order import generator_of, steps_per_epoch


@dataclass(frozen=True)
class Piece:
    """The samples [first, stop) of a shard."""

    shard: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Stretch:
    """The samples [first, stop) of the line."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def shard_order(shards: int, seed: int, epoch: int) -> list[int]:
    """Order of the shards in an epoch."""
    return torch.randperm(shards, generator=generator_of(seed, epoch)).tolist()


def stretch_of_training(samples: int, place: Place) -> Stretch:
    """What a rank trains on in an epoch."""
    length = steps_per_epoch(samples, place) * place.batch
    return Stretch(place.rank * length, (place.rank + 1) * length)


def stretch_of_testing(samples: int, place: Place) -> Stretch:
    """What a rank tests: all samples are dealt, and the ranks' shares differ by one at most."""
    return Stretch(place.rank * samples // place.world, (place.rank + 1) * samples // place.world)


def worker_stretch(stretch: Stretch, batch: int, worker: int, workers: int) -> Stretch:
    """What a worker reads of its rank's stretch: as many samples as batches w, w + W, … of the rank hold."""
    batches = -(-len(stretch) // batch)
    each, more = divmod(batches, workers)
    # Whoever makes the last batch, which may not be full, reads the end of the stretch; the others change places.
    last = (batches - 1) % workers if batches else 0
    ahead = [other for other in range(workers) if other != last]
    position = len(ahead) if worker == last else ahead.index(worker)
    before = sum(each + (other < more) for other in ahead[:position])
    first = stretch.first + before * batch
    count = each + (worker < more)
    return Stretch(min(first, stretch.stop), min(first + count * batch, stretch.stop))


def pieces_of(stretch: Stretch, sizes: Sequence[int], order: Sequence[int]) -> list[Piece]:
    """The parts of shards, of these sizes and in this order, that a stretch of the line consists of."""
    pieces, here = [], 0
    for shard in order:
        first, stop = max(stretch.first - here, 0), min(stretch.stop - here, sizes[shard])
        if first < stop:
            pieces.append(Piece(shard, first, stop))
        here += sizes[shard]
        if here >= stretch.stop:
            break
    return pieces
