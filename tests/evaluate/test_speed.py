"""Throughput, latency and memory."""

import time

import pytest
import torch
from torch import nn

from vitrefine.evaluate.speed import measure_speed
from vitrefine.evaluate.subject import subject_of

from .conftest import Linear


class Slow(Linear):
    """Takes ten milliseconds and, with many images, a lot of memory."""

    def forward(self, images):
        time.sleep(0.01)
        room = torch.ones(len(images), 2**19)  # 2 MiB an image
        return super().forward(images) + 0 * room.sum()


def test_a_model_of_known_speed(data):
    found = measure_speed(subject_of(Slow(), data, device="cpu"), batch=64, seconds=0.1)
    assert (found.batch, found.device[:3]) == (64, "CPU")
    assert 100 < found.images_per_s < 6400
    assert 10 <= found.latency_ms["p50"] <= found.latency_ms["p90"] <= found.latency_ms["p99"]
    assert found.runs >= 10
    assert found.memory_mib > 128


def test_no_gradients_are_kept(data):
    class Checks(Linear):
        def forward(self, images):
            assert not torch.is_grad_enabled()
            return super().forward(images)

    measure_speed(subject_of(Checks(), data, device="cpu"), batch=2, seconds=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_the_gpu(data):
    class Large(nn.Module):
        def forward(self, images):
            room = torch.zeros(2**28, device=images.device)
            return images.flatten(1)[:, :10] + room[:10]

    found = measure_speed(subject_of(Large(), data, device="cuda"), batch=2, seconds=0.05)
    assert 1024 <= found.memory_mib < 1200
