"""The most memory that a run took: each anew, though one process may train many."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator

from vitrefine.train.processes import greatest

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> None:
    """Start anew, where the system lets us; elsewhere a process that trains many runs shows the peak of all so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        with suppress(OSError):  # containers may forbid it
            _CLEAR.write_text("5")  # resets the peak of resident memory


def peak_of(device: torch.device) -> float:
    """MiB that this process took at most: on the GPU, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if _STATUS.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())):
        return int(found[1]) / 2**10
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def peak_memory(accelerator: Accelerator) -> float:
    """`peak_of` the process that took most."""
    return round(greatest(accelerator, peak_of(accelerator.device))[0], 1)
