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


def peak_memory(accelerator: Accelerator) -> float:
    """MiB, of the process that took most: on the GPU, or of the whole process where there is none."""
    if accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(accelerator.device) / 2**20
    elif _STATUS.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())):
        peak = int(found[1]) / 2**10
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return round(greatest(accelerator, peak)[0], 1)
