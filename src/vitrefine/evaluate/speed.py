"""How fast a model is, and what memory it takes: the model alone, on images that are on the device already."""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from vitrefine.evaluate.subject import Subject
from vitrefine.train.device import in_words
from vitrefine.train.memory import forget_peak, peak_of

PERCENTILES = (50, 90, 99)
_SECONDS, _LEAST, _MOST = 3.0, 10, 1000  # for each figure: time, and runs
_WARM_UP = 3


@dataclass(frozen=True)
class Speed:
    """Throughput and latency in inference, and the most memory that the throughput's batches took."""

    device: str
    batch: int
    images_per_s: float
    """By the median time of a batch."""
    latency_ms: dict[str, float]
    """Of one image: percentiles."""
    runs: int
    """Batches and single images that were timed, the fewer of the two."""
    memory_mib: float
    """On the GPU that of tensors, on a CPU that of the whole process."""


def measure_speed(subject: Subject, *, batch: int = 64, seconds: float = _SECONDS) -> Speed:
    """Time a model.

    Args:
        subject: The model.
        batch: Images at once, for the throughput.
        seconds: How long each figure is measured, at least.
    """
    forget_peak(subject.device)
    many = _times(subject, batch, seconds)
    memory = peak_of(subject.device)
    single = 1000 * _times(subject, 1, seconds)
    return Speed(
        device=in_words(subject.device),
        batch=batch,
        images_per_s=round(batch / float(np.median(many)), 1),
        latency_ms={f"p{p}": round(float(np.percentile(single, p)), 3) for p in PERCENTILES},
        runs=min(len(many), len(single)),
        memory_mib=round(memory, 1),
    )


def _times(subject: Subject, batch: int, seconds: float) -> np.ndarray:
    channels = len(subject.mean)
    generator = torch.Generator(subject.device).manual_seed(0)
    pixels = torch.rand(batch, channels, *subject.size, generator=generator, device=subject.device)
    wait = partial(torch.accelerator.synchronize, subject.device) if subject.device.type != "cpu" else lambda: None
    times: list[float] = []
    with torch.inference_mode():
        for _ in range(_WARM_UP):
            subject.logits(pixels)
        wait()
        end = time.perf_counter() + seconds
        while len(times) < _LEAST or (time.perf_counter() < end and len(times) < _MOST):
            start = time.perf_counter()
            subject.logits(pixels)
            wait()
            times.append(time.perf_counter() - start)
    return np.array(times)
