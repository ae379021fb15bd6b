"""Randomness besides the data's, such as drop path: seeded at the start of an epoch, and kept in checkpoints.

The data does not use these generators, it has its own (`data/order.py`). Worker processes that a loader starts may draw
from them nevertheless, when an epoch begins; that is why they are set after the first batch has come.
"""

import random
from typing import Any, cast

import numpy as np
import torch

from vitrefine.data.order import seed_of

_EPOCHS = 0x6D6F64656C  # tells these seeds from those of the data, which are made of (seed, epoch, …) as well


def seed_epoch(seed: int, epoch: int, rank: int, batch: int = 0) -> None:
    """Set all generators for an epoch of one process, or for the rest of one that it had no part in before."""
    value = seed_of(seed, epoch, rank, batch, _EPOCHS)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def generators_state(device: torch.device) -> dict[str, Any]:
    """The state of all generators of this process, as tensors and plain values."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
    }


def set_generators(state: dict[str, Any], device: torch.device) -> None:
    """Put all generators back."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
