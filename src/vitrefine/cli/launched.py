"""A command among processes that a launcher started."""

import os


def is_first() -> bool:
    """Whether this is the process that speaks and writes for all."""
    return os.environ.get("RANK", "0") == "0"


def is_alone() -> bool:
    """Whether there is no other process beside this one."""
    return os.environ.get("WORLD_SIZE", "1") == "1"
