"""CIFAR from each of its forms, made here in small, and the real one where it lies beside the checkout."""

import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrefine.data.arrays import ArraySet, Split, cifar, digits
from vitrefine.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "cifar100"


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        s: (rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) % 3)
        for s, n in (("train", 9), ("test", 6))
    }


def write_batches(folder, arrays, kind="cifar10"):
    label = "labels" if kind == "cifar10" else "fine_labels"
    files = {"train": "data_batch_1", "test": "test_batch"} if kind == "cifar10" else {"train": "train", "test": "test"}
    folder.mkdir()
    for split, (images, labels) in arrays.items():
        batch = {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), label: labels.tolist()}
        (folder / files[split]).write_bytes(pickle.dumps(batch, protocol=2))
    names = {("label_names" if kind == "cifar10" else "fine_label_names"): ["cat", "dog", "ship"]}
    (folder / ("batches.meta" if kind == "cifar10" else "meta")).write_bytes(pickle.dumps(names))


def same(data, arrays):
    for split, (images, labels) in arrays.items():
        ours = getattr(data, split)
        assert torch.equal(ours.images, torch.from_numpy(images).permute(0, 3, 1, 2))
        assert ours.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_official_batches(tmp_path, arrays, kind):
    write_batches(tmp_path / "batches", arrays, kind)
    data = cifar(kind, tmp_path / "batches")
    same(data, arrays)
    assert data.classes == ("cat", "dog", "ship")
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "batches", arcname="cifar")
    same(cifar(kind, tmp_path / "c.tar.gz"), arrays)


def test_npz(tmp_path, arrays):
    flat = {f"{a}_{s}": v for s, (x, y) in arrays.items() for a, v in (("x", x), ("y", y[:, None]))}
    np.savez(tmp_path / "c.npz", **flat)
    same(cifar("cifar10", tmp_path / "c.npz"), arrays)


def test_labels_in_the_byte_order_of_another_machine(tmp_path, arrays):
    flat = {f"{a}_{s}": v for s, (x, y) in arrays.items() for a, v in (("x", x), ("y", y.astype(">i4")))}
    np.savez(tmp_path / "c.npz", **flat)
    same(cifar("cifar10", tmp_path / "c.npz"), arrays)


def test_an_npz_of_floats(tmp_path, arrays):
    flat = {f"{a}_{s}": v for s, (x, y) in arrays.items() for a, v in (("x", x / 255), ("y", y))}
    np.savez(tmp_path / "c.npz", **flat)
    with pytest.raises(UserError, match=r"are float64 \(9, 32, 32, 3\); uint8 \(N, 32, 32, 3\) is expected"):
        cifar("cifar10", tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"x_train": np.zeros((9, 3, 32, 32), np.uint8)}, r"are uint8 \(9, 3, 32, 32\); uint8 \(N, 32, 32, 3\) is"),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.arange(0)}, r"are uint8 \(0, 32, 32, 3\)"),
        ({"x_test": np.zeros((6, 28, 28, 3), np.uint8)}, "for training and testing in .* differ in size; make them"),
        ({"y_train": np.array([*"abcabcabc"])}, r"the labels in .* are <U1 \(9,\); class numbers from 0 on are"),
        ({"y_train": np.arange(9) - 1}, r"the labels in .* are int64 \(9,\); class numbers"),
        ({"y_train": np.eye(9)}, r"the labels in .* are float64 \(81,\); class numbers"),
        ({"y_test": np.arange(6)}, "must hold two classes or more for training, and for testing none besides these"),
        ({"y_train": np.zeros(9, int), "y_test": np.zeros(6, int)}, "must hold two classes or more"),
        ({"y_train": np.arange(9) + 10**12, "y_test": np.arange(6) + 10**12}, "labels up to 1000000000008"),
        ({"y_train": np.arange(9) + 2, "y_test": np.arange(6) + 2}, "labels up to 10, but cifar10's end at 9"),
    ],
)
def test_arrays_that_are_no_cifar(tmp_path, arrays, changed, sentence):
    flat = {f"{a}_{s}": v for s, (x, y) in arrays.items() for a, v in (("x", x), ("y", y))}
    np.savez(tmp_path / "c.npz", **(flat | changed))
    with pytest.raises(UserError, match=sentence):
        cifar("cifar10", tmp_path / "c.npz")


def test_channel_statistics(arrays):
    images = arrays["train"][0]
    split = Split(torch.from_numpy(images).permute(0, 3, 1, 2), torch.arange(9))
    mean, std = ArraySet("small", split, split, tuple("abcdefghi")).channel_statistics()
    np.testing.assert_allclose(mean, images.mean(axis=(0, 1, 2)) / 255, rtol=1e-12)
    np.testing.assert_allclose(std, images.std(axis=(0, 1, 2)) / 255, rtol=1e-12)


def test_images_of_one_colour_can_be_normalised():
    black = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4))
    assert min(ArraySet("black", black, black, tuple("abcd")).channel_statistics()[1]) > 0


def test_mosaics(tmp_path, arrays):
    with zipfile.ZipFile(tmp_path / "part.zip", "w") as archive:
        for split, (images, labels) in arrays.items():
            for label in range(3):
                stack = images[labels == label].reshape(-1, 32, 3)
                Image.fromarray(stack).save(tmp_path / "m.png")
                archive.write(tmp_path / "m.png", f"{split}_{label}_0.png")
    data = cifar("cifar100", tmp_path)
    assert data.train.images.shape == (9, 3, 32, 32)
    assert data.train.labels.bincount().tolist() == [3, 3, 3]
    wanted = {image.tobytes() for image in arrays["train"][0]}
    assert {image.permute(1, 2, 0).contiguous().numpy().tobytes() for image in data.train.images} == wanted


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_batch_that_would_run_code_is_refused(tmp_path):
    (tmp_path / "train").write_bytes(pickle.dumps({"data": Payload(tmp_path / "marker")}))
    with pytest.raises(UserError, match="no batch of cifar100"):
        cifar("cifar100", tmp_path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train", b"not a pickle", "no batch of cifar100"),
        ("c.npz", b"nothing", "x_train"),
        ("c.tar.gz", b"nothing", "no archive"),
        ("c.zip", b"nothing", "damaged"),
        ("other.txt", b"hello", "no test and no train images"),
    ],
)
def test_bad_files_get_a_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    path = tmp_path if name in ("train", "other.txt") else tmp_path / name
    with pytest.raises(UserError, match=sentence):
        cifar("cifar100", path)


@pytest.mark.parametrize("form", ["c.tar.gz", "data_batch_1", "c.npz", "c.zip"])
def test_any_damage_gets_a_sentence(tmp_path, arrays, form):
    write_batches(tmp_path / "batches", arrays)
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "batches", arcname="cifar")
    flat = {f"{a}_{s}": v for s, (x, y) in arrays.items() for a, v in (("x", x), ("y", y))}
    np.savez_compressed(tmp_path / "c.npz", **flat)
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train_0_0.png", "train_1_0.png", "test_0_0.png"):
            Image.fromarray(arrays["test"][0].reshape(-1, 32, 3)).save(tmp_path / "m.png")
            archive.write(tmp_path / "m.png", name)
    file = tmp_path / "batches" / form if form == "data_batch_1" else tmp_path / form
    whole, chance = file.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        harmed = bytearray(whole)
        for place in chance.integers(chance.choice([200, len(whole)]), size=3):
            harmed[place] = chance.integers(256)
        file.write_bytes(bytes(harmed))
        try:
            cifar("cifar10", file.parent if form == "data_batch_1" else file)
        except UserError:
            continue


def test_only_batches_are_read_of_a_folder(tmp_path, arrays, monkeypatch):
    write_batches(tmp_path / "batches", arrays)
    (tmp_path / "batches" / "photo.jpg").write_bytes(b"large")
    read, plain = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or plain(path))
    cifar("cifar10", tmp_path)
    assert sorted(read) == ["batches.meta", "data_batch_1", "test_batch"]


def test_batches_beside_a_zip_of_something_else(tmp_path, arrays):
    write_batches(tmp_path / "batches", arrays)
    with zipfile.ZipFile(tmp_path / "notes.zip", "w") as archive:
        archive.writestr("notes.txt", "nothing to see")
    same(cifar("cifar10", tmp_path), arrays)
    with pytest.raises(UserError, match=r"notes.zip holds no test and no train images of cifar10"):
        cifar("cifar10", tmp_path / "notes.zip")


def test_missing_path():
    with pytest.raises(UserError, match="there is no nowhere"):
        cifar("cifar10", Path("nowhere"))


def test_digits():
    data = digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.size == (32, 32)
    assert data.train.images.dtype == torch.uint8
    assert data.test.labels.bincount().min() > 20


@pytest.mark.skipif(not SHARED.exists(), reason="CIFAR-100 is not beside this checkout")
def test_the_real_cifar100():
    data = cifar("cifar100", SHARED)
    assert (len(data.train), len(data.test), len(data.classes)) == (50_000, 10_000, 100)
    assert data.test.labels.bincount().tolist() == [100] * 100
    mean, std = data.channel_statistics()
    np.testing.assert_allclose(mean, (0.5071, 0.4865, 0.4409), atol=2e-4)
    np.testing.assert_allclose(std, (0.2673, 0.2564, 0.2762), atol=2e-4)
