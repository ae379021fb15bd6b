"""How long things took: training alone for throughput, everything for the total.

The first update after a start is left out of throughput: in it the model is compiled and memory is found.
"""

import time
from typing import Any

from vitrefine.train.state import Progress


class Clock:
    """Adds to the seconds of a run's progress.

    Args:
        progress: The run's.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tick = self._epoch = time.perf_counter()
        self.start_training()
        self._window, self._whole_epoch = _Rate(), _Rate()
        self.warm = False

    def start_training(self) -> None:
        """What passed since the last lap was something else."""
        self._lap, self._lap_step = time.perf_counter(), self._progress.step

    def lap(self) -> None:
        """What passed was training, or getting warm for it. To be called when the device has done it."""
        seconds, updates = time.perf_counter() - self._lap, self._progress.step - self._lap_step
        if self.warm:
            self._progress.training_seconds += seconds
            self._progress.timed_updates += updates
            self._window.add(updates, seconds)
            self._whole_epoch.add(updates, seconds)
        self.warm = self.warm or updates > 0
        self.start_training()

    def tick(self) -> None:
        """Whatever passed counts for the total."""
        now = time.perf_counter()
        self._progress.seconds += now - self._tick
        self._tick = now

    def window_rate(self, batch: int) -> float:
        """Images a second since the last call."""
        return self._window.take(batch)

    def epoch_figures(self, batch: int) -> dict[str, Any]:
        """Images a second of training, and seconds of training and testing, since the last call."""
        began, self._epoch = self._epoch, time.perf_counter()
        return {"images_per_s": self._whole_epoch.take(batch), "seconds": round(self._epoch - began, 3)}


class _Rate:
    def __init__(self) -> None:
        self.updates, self.seconds = 0, 0.0

    def add(self, updates: int, seconds: float) -> None:
        self.updates, self.seconds = self.updates + updates, self.seconds + seconds

    def take(self, batch: int) -> float:
        rate = self.updates * batch / self.seconds if self.seconds else 0.0
        self.updates, self.seconds = 0, 0.0
        return round(rate, 1)
