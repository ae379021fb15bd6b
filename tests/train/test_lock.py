"""Two runs never write into one folder, and a dead one bars nobody."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vitrefine.errors import UserError
from vitrefine.train.lock import FolderLock, is_locked

HOLDER = """
import os, sys, time
from pathlib import Path
from vitrefine.train.lock import FolderLock
FolderLock(Path(sys.argv[1])).take()
if os.fork() == 0:          # a worker process, which outlives its parent
    time.sleep(60)
    os._exit(0)
print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder's lock, and has a child."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_living_process_bars_the_folder(tmp_path, holder):
    assert is_locked(tmp_path)
    with pytest.raises(UserError, match=f"is being written by process {holder.pid} on .*; wait for it or choose"):
        FolderLock(tmp_path).take()


def test_a_dead_process_does_not_even_if_its_child_lives(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_locked(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_one_process_does_not_take_a_folder_twice(tmp_path):
    with FolderLock(tmp_path), pytest.raises(UserError, match="is being written by this very process"):
        FolderLock(tmp_path / ".").take()
    with FolderLock(tmp_path):
        pass


def test_a_folder_without_a_lock_is_free(tmp_path):
    assert not is_locked(tmp_path / "nowhere")
