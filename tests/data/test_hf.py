"""Hugging Face data sets, made here and opened from a folder; nothing is fetched."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vitrefine.data.dataset import Place
from vitrefine.data.open import open_data
from vitrefine.data.options import NOTHING, Augment, DataOptions
from vitrefine.errors import UserError

datasets = pytest.importorskip("datasets")

HERE = DataOptions(workers=0)
WHERE = Place(4, 0, 1, torch.device("cpu"), 0)
SIZE = (16, 16)


def image_of(number):
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8))


def table(count, names=("cat", "dog"), image="image", label="label"):
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=list(names))})
    rows = {image: [image_of(i) for i in range(count)], label: [i % len(names) for i in range(count)]}
    return datasets.Dataset.from_dict(rows, features=features)


def save(path, **parts):
    datasets.DatasetDict(parts).save_to_disk(str(path))
    return f"hf:{path}"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return save(tmp_path_factory.mktemp("hub") / "set", train=table(12), validation=table(6))


def test_what_is_found(text):
    data = open_data(text)
    assert (data.classes, data.train_images, data.test_images) == (("cat", "dog"), 12, 6)
    assert data.fingerprint == open_data(text).fingerprint
    (batch,) = data.test_loader(WHERE, HERE, SIZE).epoch(0)
    assert batch.targets.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_and_resumption(text, workers):
    loader = open_data(text).train_loader(WHERE, Augment(), DataOptions(workers=workers), SIZE)
    whole, rest = list(loader.epoch(0)), list(loader.epoch(0, 1))
    assert len(whole) == 3
    for once, again in zip(whole[1:], rest, strict=True):
        assert torch.equal(once.images, again.images)


def test_one_table_is_divided(tmp_path):
    table(20).save_to_disk(str(tmp_path / "t"))
    data = open_data(f"hf:{tmp_path}/t")
    assert (data.train_images, data.test_images) == (16, 4)
    (batch,) = data.test_loader(WHERE, HERE, SIZE).epoch(0)
    assert batch.targets.tolist().count(0) == 2


def test_columns_by_other_names_and_labels_that_are_texts(tmp_path):
    rows = {"img": [image_of(i) for i in range(6)], "fine_label": ["owl", "cat"] * 3, "id": list(range(6))}
    made = datasets.Dataset.from_dict(rows).cast_column("img", datasets.Image())
    data = open_data(save(tmp_path / "t", train=made, test=made))
    assert data.classes == ("cat", "owl")
    (batch,) = data.test_loader(WHERE, HERE, SIZE).epoch(0)
    assert batch.targets.tolist() == [1, 0, 1, 0, 1, 0]


def test_whole_numbers_as_labels_are_in_order(tmp_path):
    rows = {"image": [image_of(i) for i in range(12)], "label": list(range(12))}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    assert open_data(save(tmp_path / "t", train=made, test=made)).classes == tuple(map(str, range(12)))


def test_broken_images_are_skipped(tmp_path):
    file = io.BytesIO()
    image_of(0).save(file, "JPEG")
    rows = {"image": [{"bytes": file.getvalue(), "path": None} for _ in range(8)], "label": [0, 1] * 4}
    rows["image"][2]["bytes"] = file.getvalue()[:-300]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    made = datasets.Dataset.from_dict(rows, features=features)
    data = open_data(save(tmp_path / "t", train=made, test=made))
    loader = data.train_loader(WHERE, NOTHING, DataOptions(workers=0, max_broken=0.2), SIZE)
    assert sum(len(batch) for batch in loader.epoch(0)) == 8
    assert loader.skipped == {"truncated": 1}
    with pytest.raises(UserError, match=r"1 of the 8 images of hf:.* \(1 truncated; first image 2 of .* test\)"):
        list(data.test_loader(WHERE, HERE, SIZE).epoch(0))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"test": table(4)}, r"has no part called train \(it has test\)"),
        ({"train": table(4, names=["a"])}, r"holds one class only \(a\)"),
        ({"train": table(4, names="ab"), "test": table(4, names="ac")}, "classes of training and testing differ"),
        ({"train": table(4).remove_columns("image")}, r"has no column that is the image \(it has label\)"),
        ({"train": table(4).remove_columns("label")}, r"has no column that is the label \(it has image\)"),
        ({"train": table(4), "test": table(4, image="picture")}, "part test of .* has no column image, as train has"),
        ({"train": table(0)}, "is empty|cannot be opened"),
    ],
)
def test_bad_sets_get_a_sentence(tmp_path, parts, sentence):
    with pytest.raises(UserError, match=sentence):
        open_data(save(tmp_path / "t", **parts))


@pytest.mark.parametrize(
    ("kind", "labels"),
    [(datasets.ClassLabel(names=["a", "b"]), [0, None, 1]), (datasets.Value("string"), ["a", None, "b"])],
)
def test_labels_that_are_missing(tmp_path, kind, labels):
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    made = datasets.Dataset.from_dict({"image": [image_of(0)] * 3, "label": labels}, features=features)
    with pytest.raises(UserError, match=r"row 1 of .* has no label that is known \(None\); choose another data set"):
        open_data(save(tmp_path / "t", train=made))


def test_a_folder_that_is_no_set(tmp_path):
    with pytest.raises(
        UserError, match=r"cannot be opened as a Hugging Face data set \(.*\); check its name or folder"
    ):
        open_data(f"hf:{tmp_path}")


def test_a_name_that_cannot_be_fetched(monkeypatch):
    def offline(*_):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"nobody/nothing cannot be opened .*\(no route to the hub\)"):
        open_data("hf:nobody/nothing")
