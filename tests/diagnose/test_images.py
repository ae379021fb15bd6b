"""Images to look at: of sets and plain folders, as the model takes them."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import vitrefine
from vitrefine.diagnose.images import InputFormat, Sample, sample_images
from vitrefine.diagnose.subject import open_subject
from vitrefine.errors import UserError

GIVEN = InputFormat((32, 32), 3, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), None)


def test_a_model_says_what_it_takes() -> None:
    given = InputFormat.of(timm.create_model("vit_tiny_patch16_224", img_size=64))
    assert (given.size, given.channels, given.mean) == ((64, 64), 3, (0.5, 0.5, 0.5))


def test_a_plain_folder(tmp_path: Path) -> None:
    for level in range(10):
        Image.new("RGB", (40, 50), (20 * level, 0, 255)).save(tmp_path / f"{level}.png")
    (tmp_path / "notes.txt").write_text("no image")
    sample = sample_images(str(tmp_path), 5, GIVEN)
    assert sample.pictures.shape == (5, 3, 32, 32)
    reds = (sample.pictures[:, 0].mean(dim=(1, 2)) * 255).round().tolist()
    assert reds == [0, 40, 80, 120, 160]  # spread over the folder
    torch.testing.assert_close(sample.for_model(GIVEN)[:, 2], torch.full((5, 32, 32), 2.0))


def test_hidden_files_are_no_images(tmp_path: Path) -> None:
    """A Mac puts one beside every file on a disk that is not its own."""
    for name in ("a", "b"):
        Image.new("RGB", (40, 50)).save(tmp_path / f"{name}.png")
        (tmp_path / f"._{name}.png").write_bytes(b"Mac OS X")
    assert len(sample_images(str(tmp_path), 5, GIVEN).pictures) == 2


@pytest.mark.parametrize(("broken", "count"), [(104, 320), (0, 1)])
def test_a_batch_of_which_nothing_can_be_read(tmp_path: Path, broken: int, count: int) -> None:
    """The last one has one image, and so has one of a single image."""
    make_set(tmp_path, 105)
    (tmp_path / "val" / str(broken * 2 // 105) / f"{broken:03d}.bmp").write_bytes(b"")
    expected = [number for number in range(105) if number != broken][:count]
    assert sorted(numbers(sample_images(str(tmp_path), count, GIVEN))) == expected


def make_set(folder: Path, images: int) -> None:
    """Two classes in two halves of the test images, each of which has its number for a colour."""
    for part, count in (("train", 2), ("val", images)):
        for number in range(count):
            place = folder / part / str(number * 2 // count)
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(place / f"{number:03d}.bmp")


def numbers(sample: Sample) -> list[float]:
    return (sample.pictures[:, 0].amax(dim=(1, 2)) * 255).round().tolist()


def test_classes_are_mixed(tmp_path: Path) -> None:
    """Sets are sorted by class, and what is measured of 32 images at a time is to be of many."""
    make_set(tmp_path, 128)
    assert sum(number < 64 for number in numbers(sample_images(str(tmp_path), 64, GIVEN))[:32]) == 16
    assert sum(number < 64 for number in numbers(sample_images(str(tmp_path), 320, GIVEN))[:32]) == 16


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"bad\.png cannot be read \(not an image\)"):
        sample_images(str(tmp_path), 5, GIVEN)


def test_digits_for_a_model_of_three_channels() -> None:
    sample = sample_images("digits", 20, GIVEN)
    assert len(sample.pictures) == 20
    given = sample.for_model(GIVEN)
    assert given.shape == (20, 3, 32, 32)
    assert torch.equal(given[:, 0], given[:, 2])
    unscaled = InputFormat((32, 32), sample.pictures.shape[1], None, None, None)
    assert abs(sample.for_model(unscaled).mean().item()) < 0.5  # the set's own scaling


def test_data_that_is_not_there() -> None:
    with pytest.raises(UserError, match="there is no data set or folder 'nowhere'"):
        sample_images("nowhere", 5, GIVEN)


def test_subjects(tmp_path: Path) -> None:
    spec = "vit_tiny_patch16_224(depth=1,embed_dim=24,img_size=32,num_heads=2,num_classes=3)+cb"
    subject = open_subject(spec)
    assert (subject.name, subject.weights) == (spec, "no training: random weights")
    assert open_subject(spec.replace(")", ",pretrained=false)")).weights == "no training: random weights"
    torch.save(subject.model.state_dict(), tmp_path / "m.pth")
    named = spec.replace(")+cb", f",checkpoint_path='{tmp_path}/m.pth')")
    assert open_subject(named).weights == f"{tmp_path}/m.pth"
    vitrefine.save(subject.model, tmp_path / "m.safetensors")
    again = open_subject(str(tmp_path / "m.safetensors"))
    assert "+cb" in again.name
    assert again.weights.endswith("m.safetensors")
    more = open_subject(str(tmp_path / "m.safetensors"), "+refiner")
    assert more.name == f"{again.name}+refiner"
    assert any("refiner" in name for name, _ in more.model.named_parameters())
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(more.model(image), again.model(image))  # which starts as the identity
    with pytest.raises(UserError, match="cbb"):
        open_subject(spec, "+cbb")
    run = tmp_path / "run"
    run.mkdir()
    about = dict.fromkeys(("spec", "data", "fingerprint", "recipe"), "x") | {"base_spec": "vit+cb", "seed": 0}
    (run / "run.json").write_text(json.dumps(about | {"status": "stopped"}))
    with pytest.raises(UserError, match="has no model yet: it is stopped; finish it first, with --resume"):
        open_subject(str(run))
    (tmp_path / "m.safetensors").rename(run / "model.safetensors")
    assert open_subject(str(run)).name == "vit+cb"
    with pytest.raises(UserError, match=r"there is no file nowhere\.safetensors"):
        open_subject("nowhere.safetensors")
    with pytest.raises(UserError, match="no_such_model"):
        open_subject("no_such_model")
