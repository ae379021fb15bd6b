"""The middle of an image is hidden, and nothing else."""

import pytest
import torch

from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.occlusion import Occlusion, occlude
from vitrefine.evaluate.subject import subject_of

from .conftest import Linear


def test_the_paper_s_mask():
    """112 × 112 of 224 × 224, in the centre."""
    hidden = occlude(torch.ones(1, 3, 224, 224))
    assert float(hidden.sum()) == 3 * (224**2 - 112**2)
    assert float(hidden[:, :, 56:168, 56:168].sum()) == 0


@pytest.mark.parametrize(("size", "share"), [((8, 12), 0.5), ((7, 7), 0.5), ((8, 8), 0.25), ((8, 8), 1.0)])
def test_any_size(size, share):
    pixels = torch.ones(2, 3, *size)
    hidden = occlude(pixels, share, 0.3)
    assert float((hidden != 1).sum()) == 2 * 3 * round(share * size[0]) * round(share * size[1])
    assert float(pixels.min()) == 1  # it is a copy that is changed


def test_fill(data):
    subject = subject_of(Linear(), data, device="cpu")
    shown = Shown(torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long), torch.arange(2))
    assert float(Occlusion()(subject, shown)[:, :, 2:6, 2:6].sum()) == 0
    mean = Occlusion(fill="mean")(subject, shown)[:, :, 2:6, 2:6]
    normalised = (mean - torch.tensor(data.mean).view(1, -1, 1, 1)) / torch.tensor(data.std).view(1, -1, 1, 1)
    assert float(normalised.abs().max()) == 0
    assert Occlusion().key != Occlusion(fill="mean").key
