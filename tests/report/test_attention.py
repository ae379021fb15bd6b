"""Attention of models that were saved by runs, on the images that they were tested on."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

import vitrefine
from vitrefine.data.dataset import Place
from vitrefine.data.open import open_data
from vitrefine.data.options import DataOptions
from vitrefine.diagnose.attention import attention_entropy
from vitrefine.report import attention
from vitrefine.report.attention import IMAGES, SAMPLE, Look, look
from vitrefine.report.collect import collect
from vitrefine.train.fit import fit
from vitrefine.train.recipe import load_recipe

VIT = "vit_tiny_patch16_224(depth=2,embed_dim=48,img_size=32,num_heads=3,patch_size=4)"
SWIN = "swin_tiny_patch4_window7_224(depths=[1,1],embed_dim=12,img_size=32,num_heads=[2,2],patch_size=2,window_size=2)"


@pytest.fixture
def seen(make_run, tmp_path):
    """`seen(specs…)`: what is looked at in untrained models of these specs."""

    def run(*specs: str, fingerprint: str | None = None, data: str = "digits") -> Look:
        digits = open_data("digits")
        for spec in specs:
            folder = make_run(spec, data=data, fingerprint=fingerprint or digits.fingerprint)
            torch.manual_seed(0)
            model = vitrefine.create(fit(spec, digits, load_recipe(folder / "recipe.yaml")).spec)
            vitrefine.save(model, folder / "model.safetensors")
        (group,) = collect([tmp_path]).groups
        return look(group, "group-0")

    return run


def pixels(address: str) -> np.ndarray:
    kind, _, data = address.partition(";base64,")
    assert kind == "data:image/png"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_entropies_and_maps(seen) -> None:
    found = seen(VIT, f"{VIT}+cb")
    assert found.notes == []
    assert (found.seed, found.sample) == (0, SAMPLE)
    assert {index: len(layers) for index, layers in found.entropy.items()} == {0: 2, 1: 2}
    for layer in found.entropy[0]:
        assert len(layer.heads) == 3
        assert layer.bound == pytest.approx(np.log(65))
        assert 0 < layer.share <= 100.001
    assert len(found.pictures) == IMAGES
    assert len({picture.truth for picture in found.pictures}) == IMAGES
    picture = found.pictures[0]
    assert pixels(picture.photo).shape == (picture.height, picture.width)
    glow = pixels(picture.cells[1].overlay)
    assert glow.shape == (48, 48, 4)
    assert glow[..., 3].max() > 180  # the greatest attention is bright, the least is not
    assert glow[..., 3].min() < glow[..., 3].max()


def test_the_photo_is_the_test_image(seen) -> None:
    picture = seen(VIT).pictures[2]
    digits = open_data("digits")
    place = Place(batch=1, rank=0, world=1, device=torch.device("cpu"), seed=0)
    batch = next(iter(digits.test_loader(place, DataOptions(test_batch=1), (32, 32)).epoch(0, picture.number)))
    assert digits.classes[int(batch.targets[0])] == picture.truth
    grey = (batch.images[0] * torch.tensor(digits.std).view(-1, 1, 1) + torch.tensor(digits.mean).view(-1, 1, 1)).mean(
        0
    )
    assert np.abs(pixels(picture.photo) - 255 * grey.numpy()).max() < 1.5


def test_images_are_normalised_as_the_model_takes_them(seen, monkeypatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(
        attention, "attention_entropy", lambda model, images: given.append(images) or attention_entropy(model, images)
    )
    seen(VIT)
    assert torch.allclose(given[0].amin(), torch.tensor(-1.0))  # black, where mean and deviation are 0.5
    assert torch.allclose(given[0].amax(), torch.tensor(1.0), atol=0.01)


def test_models_that_cannot_be_looked_into_are_named(seen) -> None:
    found = seen(VIT, SWIN, "resnet10t")
    assert set(found.entropy) == {0, 1}
    assert set(found.pictures[0].cells) == {0}
    windows, convolutions = found.notes
    assert windows.startswith("swin_tiny")
    assert "sees the whole image at once" in windows
    assert convolutions.startswith("resnet10t: ")


def test_models_that_are_gone(seen, make_run) -> None:
    for modification in ("cb", "se"):
        make_run(f"{VIT}+{modification}", fingerprint=open_data("digits").fingerprint, started="2026-05-01")
    found = seen(VIT)
    assert set(found.entropy) == {0}
    assert found.notes == [
        "Attention of +cb and +se is not shown, for there is no model.safetensors in the folder of the run."
    ]


def test_data_that_is_gone(seen) -> None:
    assert seen(VIT, data="folder:nowhere").notes[0].startswith("Attention is not shown, because the data cannot be")


def test_data_that_has_changed(seen) -> None:
    assert "digits is no longer what the runs were tested on" in seen(VIT, fingerprint="other").notes[0]
