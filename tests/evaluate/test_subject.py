"""The model that is tested: prepared as it knows images, and refused where that cannot be."""

import copy
import json

import pytest
import torch
from torch import nn

import vitrefine
from vitrefine.diagnose.named import run_of
from vitrefine.errors import UserError
from vitrefine.evaluate.attacks import FGSM
from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.open import open_subject
from vitrefine.evaluate.speed import measure_speed
from vitrefine.evaluate.subject import subject_of

from .conftest import Linear, small_set

SMALL = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=1,embed_dim=24,num_heads=3,num_classes=10)"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vitrefine.create(f"{SMALL}+cb")


@pytest.fixture
def large():
    return small_set(size=32)


def test_normalised_as_the_model_knows(model, large):
    """Not as the data is: pixels come in, and the model's own mean and deviation are applied."""
    subject = subject_of(model, large, device="cpu")
    assert (subject.mean, subject.std) == ((0.5,) * 3, (0.5,) * 3)
    assert (subject.size, subject.crop_ratio, subject.notes) == ((32, 32), 1.0, ())
    assert subject.name == str(vitrefine.spec_of(model))
    pixels = torch.rand(2, 3, 32, 32)
    assert torch.allclose(subject.logits(pixels), model.eval()(2 * pixels - 1), atol=1e-5)


def test_a_model_that_says_nothing_takes_the_data_s(data):
    subject = subject_of(Linear(), data, device="cpu")
    assert (subject.size, subject.mean) == ((8, 8), data.mean)
    assert "does not say how its images are normalised" in subject.notes[0]


def test_the_key_is_of_the_weights(model, large):
    keys = {subject_of(model, large, device="cpu").key for _ in range(2)}
    with torch.no_grad():
        model.head.bias[0] += 1
    keys.add(subject_of(model, large, device="cpu").key)
    assert len(keys) == 2


def test_bf16(model, large):
    subject = subject_of(model, large, device="cpu", precision="bf16")
    pixels = torch.rand(2, 3, 32, 32)
    found = subject.logits(pixels)
    assert found.dtype == torch.float32
    assert not torch.equal(found, subject_of(model, large, device="cpu").logits(pixels))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision(model, large, dtype):
    """As its weights are, so a model computes; and that is said."""
    pixels = torch.rand(2, 3, 32, 32)
    exact = subject_of(model, large, device="cpu").logits(pixels)
    subject = subject_of(copy.deepcopy(model).to(dtype), large, device="cpu")
    assert subject.notes == (f"the model computes in {str(dtype)[6:]}, as its weights are",)
    found = subject.logits(pixels)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0.05)


def test_checkpoints(model, large, tmp_path):
    path = tmp_path / "model.safetensors"
    images = {"mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.9}
    vitrefine.save(model, path, input_config=images, classes=large.classes)
    subject = open_subject(str(path), large, device="cpu")
    assert (subject.mean, subject.std, subject.crop_ratio) == ((0.1,) * 3, (0.2,) * 3, 0.9)
    assert subject_of(vitrefine.load(path), large, device="cpu").crop_ratio == 0.9
    assert subject.name.endswith("+cb")
    assert open_subject(str(path), large, device="cpu", crop_ratio=1.1).crop_ratio == 1.1
    with pytest.raises(UserError, match="holds its own weights; leave --pretrained out"):
        open_subject(str(path), large, pretrained=True)


def test_the_crop_of_another_set_is_not_taken(model, large, tmp_path):
    """That of timm's configuration is for photographs; saved and loaded or not, the answer is the same."""
    path = tmp_path / "model.safetensors"
    vitrefine.save(model, path)
    assert vitrefine.load(path).pretrained_cfg["crop_pct"] == 0.9
    assert open_subject(str(path), large, device="cpu").crop_ratio == 1.0


def test_a_ratio_of_zero_is_not_taken_for_none(model, large, tmp_path):
    path = tmp_path / "model.safetensors"
    vitrefine.save(model, path, input_config={"mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.9})
    with pytest.raises(UserError, match="a crop ratio of 0 cannot be had"):
        open_subject(str(path), large, device="cpu", crop_ratio=0.0)


def test_a_size_that_the_model_cannot_take(model, large):
    with pytest.raises(UserError, match=r"cannot take images of 30×30 pixels; it takes 32×32 if the size is left out"):
        subject_of(model, large, size=(30, 30), device="cpu")


def test_attacks_after_timing(model, large):
    """Timing works without gradients, and must leave nothing behind that cannot have any."""
    subject = subject_of(model, large, device="cpu")
    measure_speed(subject, batch=2, seconds=0.01)
    shown = Shown(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]), torch.arange(2))
    assert not torch.equal(FGSM(4)(subject, shown), shown.pixels)


def test_classes_in_another_order_are_refused(model, large, tmp_path):
    path = tmp_path / "model.safetensors"
    vitrefine.save(model, path, classes=large.classes[::-1])
    with pytest.raises(UserError, match="in another order"):
        open_subject(str(path), large)
    vitrefine.save(model, path, classes=[f"c{i}" for i in range(10)])
    (note,) = open_subject(str(path), large, device="cpu").notes
    assert note.endswith("their names differ: the model's c0 is the data's 0")


def test_runs(model, large, tmp_path):
    about = {"spec": SMALL, "base_spec": "vit+cb", "data": "digits", "fingerprint": "", "recipe": "", "seed": 0}
    (tmp_path / "run.json").write_text(json.dumps({**about, "status": "stopped"}))
    with pytest.raises(UserError, match=r"has no model.safetensors yet \(it is stopped\)"):
        open_subject(str(tmp_path), large)
    vitrefine.save(model, tmp_path / "model.safetensors")
    for text in (str(tmp_path), str(tmp_path / "model.safetensors")):
        assert run_of(text).data == "digits"
        assert open_subject(text, large, device="cpu").name == "vit+cb"


def test_specs_need_weights(large):
    with pytest.raises(UserError, match="its weights would be random; add --pretrained"):
        open_subject(SMALL, large)


def test_complaints(model, large):
    with pytest.raises(UserError, match="tells 10 classes apart, but small has 7"):
        subject_of(model, small_set(size=32, classes=7))
    for ratio in (-1, 1e-4, 5, float("nan")):
        with pytest.raises(UserError, match=f"a crop ratio of {ratio:g} cannot be had; give one from 0.1 to 4"):
            subject_of(model, large, crop_ratio=ratio)
    with pytest.raises(UserError, match="there is no precision 'fp8'"):
        subject_of(model, large, precision="fp8")
    with pytest.raises(UserError, match="there is no device tpu9"):
        subject_of(model, large, device="tpu9")
    with pytest.raises(UserError, match="there is no device meta"):
        subject_of(model, large, device="meta")
    with pytest.raises(UserError, match="takes images of 1 channels, but small has 3"):
        subject_of(vitrefine.create("vit_tiny_patch16_224(in_chans=1,depth=1,num_classes=10)"), large)


def test_a_model_of_transformers(large):
    """Called by position, with its own size; it says nothing of means, so the data's are taken, and that is said."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=10, **sizes)
    subject = subject_of(transformers.ViTForImageClassification(config), large, device="cpu")
    assert subject.size == (16, 16)
    assert subject.logits(torch.rand(2, 3, 16, 16)).shape == (2, 10)
    assert len(subject.notes) == 1


def test_a_model_of_text(large):
    class Text(nn.Module):
        config = type("Config", (), {"vocab_size": 10})()

    with pytest.raises(UserError, match="takes no images"):
        subject_of(Text(), large)
