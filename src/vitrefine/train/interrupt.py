"""SIGTERM and Ctrl-C while training: the first asks for a stop at a good moment, a second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """While it is entered, `asked` tells whether the run should stop.

    Args:
        say: Told in one sentence what was heard.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._ctrl_c = False
        self._before: dict[int, Any] = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._ctrl_c:
            raise KeyboardInterrupt
        self._ctrl_c = self._ctrl_c or number == signal.SIGINT
        if not self.asked:
            again = "; Ctrl-C once more ends it without" if number == signal.SIGINT else ""
            self._say(f"asked to stop: writing a checkpoint after this step{again}")
        self.asked = True

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # others cannot hear signals
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
