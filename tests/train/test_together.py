"""Runs in processes of their own, and the process that they were begun for."""

import multiprocessing

import pytest

from vitrefine.train import together
from vitrefine.train.job import Stopped
from vitrefine.train.run import read_run


def test_a_run_that_nobody_waits_for_is_stopped(small_job, tmp_path, monkeypatch):
    monkeypatch.setattr(together.os, "setpgrp", lambda: None)
    here, there = multiprocessing.Pipe(duplex=False)
    here.close()
    with pytest.raises(Stopped):
        together._work(small_job(tmp_path), there)
    assert read_run(tmp_path).status == "stopped"
