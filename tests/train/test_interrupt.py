"""The first signal asks, the second Ctrl-C ends; and several processes agree."""

import os
import signal

import pytest

from vitrefine.train.agreement import Agreement
from vitrefine.train.interrupt import Interrupts


def test_the_first_asks_and_the_second_ctrl_c_ends():
    said = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(said.append) as interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # launchers send it more than once
        assert interrupts.asked
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert said == ["asked to stop: writing a checkpoint after this step"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_says_that_another_ends_it():
    said = []
    with Interrupts(said.append):
        os.kill(os.getpid(), signal.SIGINT)
    assert said == ["asked to stop: writing a checkpoint after this step; Ctrl-C once more ends it without"]


class Accelerator:
    num_processes = 2


def test_processes_ask_each_other_every_few_seconds(monkeypatch):
    """Not at every step, but soon enough; and whenever it must be."""
    asked_at, clock = [], iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: 0.1 * next(clock))

    def greatest(accelerator, *values):
        asked_at.append(step)
        return [1.0 if step >= 30 else 0.0, 0.1]

    monkeypatch.setattr("vitrefine.train.agreement.greatest", greatest)
    agreement = Agreement(Accelerator(), lambda: False)
    answers = []
    for step in range(1, 50):
        answers.append(agreement.to_stop(step))
    assert asked_at == [1, 21, 41]
    assert answers.index(True) == 40
    step = 50
    assert agreement.to_stop(step, now=True)
