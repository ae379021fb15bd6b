"""ImageNet in small: class numbers, the other test sets, the ReaL labels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitrefine.data.dataset import Place
from vitrefine.data.imagenet import imagenet_a_classes, only_classes, real_hits, real_labels, wnids
from vitrefine.data.open import open_data
from vitrefine.data.options import NOTHING, DataOptions
from vitrefine.errors import UserError

HERE = DataOptions(workers=0)
WHERE = Place(2, 0, 1, torch.device("cpu"), 0)


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(path, "JPEG")
    return folder


def labels_of(data):
    (batch,) = data.test_loader(WHERE, HERE, (16, 16)).epoch(0)
    return batch.targets.tolist()


def test_classes_have_their_numbers_even_where_most_are_missing(tmp_path):
    write(tmp_path / "train", "n01443537/a.JPEG", "n15075141/b.JPEG")
    write(tmp_path / "val", "n15075141/ILSVRC2012_val_00000002.JPEG", "n01440764/ILSVRC2012_val_00000001.JPEG")
    data = open_data(f"imagenet:{tmp_path}")
    assert len(data.classes) == 1000
    assert data.train_source.labels.tolist() == [1, 999]
    assert labels_of(data) == [0, 999]


def test_validation_images_are_enough_for_testing(tmp_path):
    write(tmp_path / "val", "n15075141/ILSVRC2012_val_00000002.JPEG")
    data = open_data(f"imagenet:{tmp_path}")
    assert labels_of(data) == [999]
    with pytest.raises(UserError, match="has no images to train on; add them, or train on another set"):
        data.train_loader(WHERE, NOTHING, HERE, (16, 16))


def test_v2_is_read_as_numbers(tmp_path):
    data = open_data(f"imagenet-v2:{write(tmp_path, '0/a.jpeg', '2/b.jpeg', '10/c.jpeg', '999/d.jpeg')}")
    assert labels_of(data) == [0, 2, 10, 999]
    with pytest.raises(UserError, match="has no images to train on; add them, or train on another set"):
        data.train_loader(WHERE, NOTHING, HERE, (16, 16))


def test_a_and_its_classes(tmp_path):
    assert len(imagenet_a_classes()) == 200
    assert imagenet_a_classes()[0] == 6
    (tmp_path / "README.txt").write_text("")
    assert labels_of(open_data(f"imagenet-a:{write(tmp_path, 'n01498041/a.jpg')}")) == [6]
    write(tmp_path, "n01440764/b.jpg")
    with pytest.raises(UserError, match="holds n01440764, which is no class of ImageNet-A; write imagenet:"):
        open_data(f"imagenet-a:{tmp_path}")


def test_only_the_classes_of_a_are_predicted():
    logits = torch.zeros(2, 1000)
    logits[0, 0], logits[0, 11], logits[1, 6] = 9.0, 5.0, 1.0
    assert only_classes(logits, imagenet_a_classes()).argmax(dim=1).tolist() == [11, 6]
    with pytest.raises(UserError, match="a model of 10 classes cannot be tested on ImageNet's 1000"):
        only_classes(torch.zeros(1, 10), imagenet_a_classes())


def test_real_labels_go_by_the_name(tmp_path):
    (tmp_path / "real.json").write_text(json.dumps([[3], [], [5, 7]]))
    names = ["n1/ILSVRC2012_val_00000003.JPEG", "n2/ILSVRC2012_val_00000001.JPEG", "n2/ILSVRC2012_val_00000002.JPEG"]
    labels = real_labels(names, tmp_path / "real.json")
    assert labels == [(5, 7), (3,), ()]
    right, counted = real_hits(torch.tensor([7, 4, 0]), labels)
    assert right.tolist() == [True, False, False]
    assert counted.tolist() == [True, True, False]


def test_timms_copy_of_the_real_labels():
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 50_001)]
    labels = real_labels(names)
    assert len(labels) == 50_000
    assert sum(not one for one in labels) == 3163  # as the paper says, 46,837 images have labels
    assert max(max(one) for one in labels if one) == 999


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("dog.jpg", "[]", "dog.jpg is no ImageNet validation image"),
        (
            "ILSVRC2012_val_00000009.JPEG",
            "[[1]]",
            "there are no ReaL labels for ILSVRC2012_val_00000009.JPEG: 1 images",
        ),
        ("ILSVRC2012_val_00000001.JPEG", "{", "is no JSON; give the path of real.json"),
        ("ILSVRC2012_val_00000001.JPEG", "[1, 2]", "is no list of lists of class numbers"),
        ("ILSVRC2012_val_00000001.JPEG", None, "cannot be read; give the path of real.json"),
    ],
)
def test_bad_real_labels(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / "real.json").write_text(content)
    with pytest.raises(UserError, match=sentence):
        real_labels([name], tmp_path / "real.json")


def test_folders_that_are_not_imagenet(tmp_path):
    write(tmp_path / "train", "n01443537/a.JPEG", "cat/b.JPEG")
    with pytest.raises(UserError, match="there is no folder val in"):
        open_data(f"imagenet:{tmp_path}")
    write(tmp_path / "val", "n01443537/a.JPEG")
    with pytest.raises(UserError, match=r"no classes \(cat\); they are called n01440764 … n15075141"):
        open_data(f"imagenet:{tmp_path}")
    (tmp_path / "train" / "cat" / "b.JPEG").unlink()
    (tmp_path / "train" / "cat").rmdir()
    (tmp_path / "val" / "n01443537" / "a.JPEG").rename(tmp_path / "val" / "a.JPEG")
    (tmp_path / "val" / "n01443537").rmdir()
    with pytest.raises(UserError, match="are in no class folders"):
        open_data(f"imagenet:{tmp_path}")
    with pytest.raises(UserError, match=r"no classes \(train, val\); they are called 0 … 999"):
        open_data(f"imagenet-v2:{tmp_path}")


def test_the_names_are_sorted():
    assert len(wnids()) == len(set(wnids())) == 1000
    assert list(wnids()) == sorted(wnids())
