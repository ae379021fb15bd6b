"""Several processes stop at the same step, though they hear of it at different ones."""

import time
from collections.abc import Callable

from accelerate import Accelerator

from vitrefine.train.processes import greatest

SECONDS = 2.0  # they ask each other about so often; to ask at every step would make each wait for the slowest
MOST_STEPS = 1000


class Agreement:
    """Whether to stop, the same answer for all processes that ask at the same step.

    Args:
        accelerator: For the other processes.
        asked: Whether this process was asked to stop.
    """

    def __init__(self, accelerator: Accelerator, asked: Callable[[], bool]) -> None:
        self._accelerator, self._asked = accelerator, asked
        self._next = 0
        self._step, self._time = 0, time.perf_counter()

    def to_stop(self, step: int, now: bool = False) -> bool:
        """Asked after every step; with `now` the others are asked in any case."""
        if self._accelerator.num_processes == 1:
            return self._asked()
        if step < self._next and not now:
            return False
        passed = (time.perf_counter() - self._time) / max(step - self._step, 1)
        asked, seconds = greatest(self._accelerator, float(self._asked()), passed)
        self._step, self._time = step, time.perf_counter()
        self._next = step + min(max(int(SECONDS / max(seconds, 1e-9)), 1), MOST_STEPS)
        return asked > 0
