"""Throughput: of training alone, and warm."""

import pytest

from vitrefine.train.clock import Clock
from vitrefine.train.state import Progress


@pytest.fixture
def now(monkeypatch):
    time = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: time[0])
    return time


def test_throughput_is_of_warm_training_alone(now):
    progress = Progress(step=7)
    clock = Clock(progress)

    def train(updates, seconds):
        progress.step += updates
        now[0] += seconds
        clock.lap()

    clock.start_training()
    train(1, 60.0)  # compiling
    assert (progress.timed_updates, clock.window_rate(10)) == (0, 0.0)
    train(4, 2.0)
    assert clock.window_rate(10) == 20.0
    now[0] += 5  # a checkpoint
    clock.start_training()
    train(6, 2.0)
    assert clock.window_rate(10) == 30.0
    now[0] += 9  # a test
    clock.tick()
    assert clock.epoch_figures(10) == {"images_per_s": 25.0, "seconds": 78.0}
    assert (progress.timed_updates, progress.training_seconds, progress.seconds) == (10, 4.0, 78.0)
