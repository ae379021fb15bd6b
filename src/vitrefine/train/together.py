"""Several runs at a time, each in a process of its own.

What a small model leaves of a GPU is there for the others, and they compile side by side. Ctrl-C and SIGTERM reach this
process alone, which asks the others to stop; each of them writes its checkpoint then.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from vitrefine.train.engine import train
from vitrefine.train.interrupt import Interrupts
from vitrefine.train.job import Job, Line, Result, Start, Stopped, Watcher


class _Relay:
    """A `Watcher` that passes on what it is told, as the name of a method and its argument."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def on_start(self, start: Start) -> None:
        self._tell("on_start", start)

    def on_step(self, line: Line) -> None:
        self._tell("on_step", line)

    def on_epoch(self, line: Line) -> None:
        self._tell("on_epoch", line)

    def on_note(self, sentence: str) -> None:
        self._tell("on_note", sentence)

    def on_end(self, result: Result) -> None:
        self._tell("on_end", result)

    def _tell(self, *told: Any) -> None:
        try:
            self._pipe.send(told)
        except BrokenPipeError:  # the process that this was begun for has been killed
            raise Stopped from None


def _work(job: Job, pipe: Connection) -> None:
    os.setpgrp()  # where no Ctrl-C of a terminal is heard
    try:
        train(job, watch=_Relay(pipe))
    except Exception as error:  # it is the other process that says so
        pipe.send(("failed", str(error) or repr(error)))


def train_together(
    jobs: Sequence[Job],
    at_once: int,
    watch: Callable[[Job], Watcher],
    failed: Callable[[Job, str], None],
    say: Callable[[str], None],
) -> None:
    """Train jobs, some at a time.

    Args:
        jobs: In the order in which they are begun.
        at_once: Processes.
        watch: Who is told how a job goes, here.
        failed: Told of a job that came to no end, and why.
        say: Told that this process was asked to stop.

    Raises:
        Stopped: After SIGTERM or Ctrl-C, when all have ended.
    """
    at_once = min(at_once, len(jobs))
    left = deque(replace(job, at_once=at_once) for job in jobs)
    running: dict[Connection, tuple[SpawnProcess, Job, Watcher]] = {}
    context = multiprocessing.get_context("spawn")

    def begin(job: Job) -> None:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, there), name=job.folder.name)
        process.start()
        there.close()  # so that its end is seen here when the process has ended
        running[here] = process, job, watch(job)

    def hear(pipe: Connection) -> None:
        process, job, watcher = running[pipe]
        try:
            what, told = pipe.recv()
        except EOFError:
            del running[pipe]
            process.join()
            # Asked to stop before it could hear that, it was ended by the signal.
            if process.exitcode and not (interrupts.asked and process.exitcode == -signal.SIGTERM):
                failed(job, f"its process ended with {_told(process.exitcode)}")
            return
        if what == "failed":
            failed(job, told)
        else:
            getattr(watcher, what)(told)

    with Interrupts(say) as interrupts:
        asked = False
        try:
            while running or (left and not interrupts.asked):
                while left and len(running) < at_once and not interrupts.asked:
                    begin(left.popleft())
                if interrupts.asked and not asked:
                    asked = True
                    for process, _, _ in running.values():
                        process.terminate()
                for pipe in wait(list(running), timeout=0.2):
                    hear(pipe)  # type: ignore[arg-type]
        finally:
            for process, _, _ in running.values():
                process.kill()
    if interrupts.asked:
        raise Stopped


def _told(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code} ({signal.Signals(-code).name})"
