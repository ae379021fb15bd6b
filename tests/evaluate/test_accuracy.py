"""Accuracies with their intervals, and the labels of ImageNet's other test sets."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.stats import binomtest
from torch import nn

from vitrefine.data.imagenet import imagenet_a_classes, real_labels, wnids
from vitrefine.data.open import open_data
from vitrefine.evaluate.accuracy import choices, measure_accuracy
from vitrefine.evaluate.images import ImageSet
from vitrefine.evaluate.predictions import Examiner, Predictions, fetched, score
from vitrefine.evaluate.subject import subject_of

from .conftest import small_set


class Constant(nn.Module):
    """The same logits for every image."""

    def __init__(self, logits):
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, images):
        return self.logits.expand(len(images), -1)


def scored(logits, targets):
    """In two batches."""
    halves = (x.split(len(x) // 2 + 1) for x in (logits, targets, torch.arange(len(targets))))
    return Predictions(**fetched([score(*half) for half in zip(*halves, strict=True)]))


def test_against_scipy_and_torch():
    chance = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(200, 10, generator=chance), torch.randint(0, 10, (200,), generator=chance)
    logits[torch.arange(200), targets] += 1.5
    found = measure_accuracy(scored(logits, targets), small_set())
    right = int((logits.argmax(1) == targets).sum())
    wilson = binomtest(right, 200).proportion_ci(method="wilson")
    assert found.top1.value == pytest.approx(right / 2)
    assert (found.top1.low, found.top1.high) == pytest.approx((100 * wilson.low, 100 * wilson.high))
    assert found.top5.value == pytest.approx(100 * (logits.topk(5).indices == targets[:, None]).any(1).float().mean())
    assert found.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert found.confidence == pytest.approx(100 * logits.softmax(1).amax(1).mean().item(), rel=1e-5)
    assert found.real is None
    assert sum(each.images for each in found.reliability) == 200


def test_five_classes_have_no_top_five():
    logits, targets = torch.eye(5), torch.arange(5)
    found = measure_accuracy(scored(logits, targets), small_set(classes=5))
    assert found.top5 is None
    assert found.top1.value == 100


def write_images(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for name in names:
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(folder / name)


def examine(data, logits):
    subject = subject_of(Constant(logits), data, size=(8, 8), device="cpu")
    images = ImageSet(data, subject.device, batch=2, workers=0)
    return measure_accuracy(Examiner(subject, images, choices(data)).predict(), data)


def test_real_labels(tmp_path):
    """Right if the prediction is among an image's labels; images without any do not count."""
    labels = real_labels([f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 200)])
    several = next(i for i, each in enumerate(labels) if len(each) > 1)
    none = next(i for i, each in enumerate(labels) if not each)
    single = next(i for i, each in enumerate(labels) if len(each) == 1)
    other = labels[several][1]
    write_images(tmp_path / "train" / wnids()[0], ["a.png"])
    names = [f"ILSVRC2012_val_{number + 1:08d}.png" for number in (several, none, single)]
    write_images(tmp_path / "val" / wnids()[0], names)
    logits = torch.zeros(1000)
    logits[other] = 9
    found = examine(open_data(f"imagenet:{tmp_path}"), logits)
    assert found.top1.value == (100 if other == 0 else 0)
    expected = 1 + (other in labels[single])
    assert (found.real.value, found.real.count) == (100 * expected / 2, 2)


def test_images_of_other_names_have_no_real_labels(tmp_path):
    write_images(tmp_path / "train" / wnids()[0], ["a.png"])
    write_images(tmp_path / "val" / wnids()[1], ["b.png"])
    found = examine(open_data(f"imagenet:{tmp_path}"), F.one_hot(torch.tensor(1), 1000).float())
    assert found.real is None
    assert found.top1.value == 100


def test_imagenet_a(tmp_path):
    """A model that prefers a class which is none of the 200 is judged by its best of these."""
    inside = imagenet_a_classes()[3]
    outside = next(i for i in range(1000) if i not in imagenet_a_classes())
    write_images(tmp_path / wnids()[inside], ["a.png", "b.png"])
    logits = torch.zeros(1000)
    logits[outside], logits[inside] = 9, 5
    found = examine(open_data(f"imagenet-a:{tmp_path}"), logits)
    assert found.top1.value == 100
    assert found.confidence == pytest.approx(100 * np.exp(5) / (np.exp(5) + 199), rel=1e-5)


def test_imagenet_v2(tmp_path):
    """Folders are numbers: 10 is class 10, whatever its place among the names."""
    write_images(tmp_path / "10", ["a.png"])
    write_images(tmp_path / "2", ["b.png"])
    found = examine(open_data(f"imagenet-v2:{tmp_path}"), F.one_hot(torch.tensor(10), 1000).float())
    assert found.top1.value == 50
