"""Noise of the right size, blur as SciPy's, and both the same whenever they are made."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.noise import Blur, GaussianNoise, ShotNoise, blur
from vitrefine.evaluate.subject import subject_of

from .conftest import Linear


@pytest.fixture
def subject(data):
    return subject_of(Linear(), data, device="cpu")


def grey(level: float, images: int = 4, size: int = 64) -> Shown:
    pixels = torch.full((images, 3, size, size), level)
    return Shown(pixels, torch.zeros(images, dtype=torch.long), torch.arange(images))


@pytest.mark.parametrize("sigma", [5, 10])
def test_gaussian_noise(subject, sigma):
    """Mean and deviation over 49,152 pixels lie within four standard errors."""
    noise = 255 * (GaussianNoise(sigma)(subject, grey(0.5)) - 0.5).double()
    count = noise.numel()
    assert abs(float(noise.mean())) < 4 * sigma / count**0.5
    assert float(noise.std()) == pytest.approx(sigma, abs=4 * sigma / (2 * count) ** 0.5)


@pytest.mark.parametrize("level", [0.1, 0.5])
def test_shot_noise(subject, level):
    """Poisson(60 x)/60: mean x, variance x/60, and only multiples of 1/60."""
    found = ShotNoise()(subject, grey(level)).double()
    count = found.numel()
    assert float(found.mean()) == pytest.approx(level, abs=4 * (level / 60 / count) ** 0.5)
    assert float(found.var()) == pytest.approx(level / 60, rel=0.05)
    assert float((60 * found - (60 * found).round()).abs().max()) < 1e-4


@pytest.mark.parametrize("change", [GaussianNoise(200), ShotNoise(2)])
def test_pixels_stay_pixels(subject, change):
    found = change(subject, grey(0.9))
    assert float(found.min()) >= 0
    assert float(found.max()) == 1


def test_shot_noise_leaves_black_alone(subject):
    assert float(ShotNoise()(subject, grey(0.0)).abs().max()) == 0


@pytest.mark.parametrize("kind", [lambda *seeds: GaussianNoise(5, *seeds), lambda *seeds: ShotNoise(60, *seeds)])
def test_repeatable(subject, kind):
    shown = grey(0.5)
    first, again = kind(0, 0)(subject, shown), kind(0, 0)(subject, shown)
    assert torch.equal(first, again)
    assert torch.equal(kind(0, 0)(subject, shown.part(torch.tensor([2]))), first[2:3])
    assert not torch.equal(first[0], first[1])
    keys = {kind(0, 0).key}
    for seeds in ((1, 0), (0, 1)):
        assert not torch.equal(kind(*seeds)(subject, shown), first)
        keys.add(kind(*seeds).key)
    assert len(keys) == 3


@pytest.mark.parametrize("sigma", [1, 2])
def test_blur_is_scipy_s(subject, sigma):
    pixels = torch.rand(2, 3, 32, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = gaussian_filter(pixels.numpy(), sigma, mode="mirror", truncate=4.0, axes=(2, 3))
    assert np.allclose(blur(pixels, sigma), expected, atol=1e-6)
    assert float(blur(torch.ones(1, 3, 9, 9), sigma).sub(1).abs().max()) < 1e-6


def test_blur_of_tiny_images():
    assert blur(torch.rand(1, 3, 4, 4), 2).shape == (1, 3, 4, 4)


def test_blur_is_a_change(subject):
    shown = grey(0.5, size=16)
    assert torch.allclose(Blur(1)(subject, shown), shown.pixels, atol=1e-6)
    assert Blur(1).key != Blur(2).key
