"""WebDataset shards, made here in small: what is read, by whom, and what happens where something is broken."""

import io
import json
import shutil
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from vitrefine.data.dataset import Place
from vitrefine.data.open import open_data
from vitrefine.data.options import NOTHING, Augment, DataOptions
from vitrefine.data.shard_reader import buffered_order
from vitrefine.errors import UserError

pytest.importorskip("webdataset")

CPU = torch.device("cpu")
HERE = DataOptions(workers=0)
SIZE = (16, 16)


def place(batch=4, rank=0, world=1, seed=3):
    return Place(batch, rank, world, CPU, seed)


def image_of(number):
    file = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def write_shard(path, samples):
    with tarfile.open(path, "w") as archive:
        for key, files in samples:
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_shards(folder, sizes, name="train"):
    number = 0
    for i, size in enumerate(sizes):
        samples = []
        for _ in range(size):
            samples.append((f"{number:05d}", {"png": image_of(number), "cls": str(number % 3).encode()}))
            number += 1
        write_shard(folder / f"{name}-{i:02d}.tar", samples)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = write_shards(tmp_path_factory.mktemp("shards"), [7, 12, 3, 9, 10])
    return write_shards(folder, [5, 6], "test")


@pytest.fixture
def data(root):
    return open_data(f"wds:{root}/train-{{00..04}}.tar::{root}/test-{{00..01}}.tar")


def test_the_users_folder(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root))
    data = open_data("wds:~/train-{00..04}.tar::~/test-*.tar")
    assert (data.train_images, data.test_images) == (41, 11)


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.index, b.index)


def test_what_is_found(data, root):
    assert data.classes == ("0", "1", "2")
    assert (data.train_images, data.test_images, data.channels, data.size) == (41, 11, 3, None)
    starred = open_data(f"wds:{root}/train-*.tar::{root}/test-*.tar")
    assert starred.fingerprint == data.fingerprint


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_has_each_image_once(data, workers, world):
    options, seen = DataOptions(workers=workers), []
    for rank in range(world):
        loader = data.train_loader(place(4, rank, world), NOTHING, options, SIZE)
        batches = list(loader.epoch(0))
        assert len(batches) == len(loader) == 41 // (4 * world)
        assert all(batch.targets.argmax(dim=1).equal(batch.index % 3) for batch in batches)
        seen += [i for batch in batches for i in batch.index.tolist()]
    assert len(set(seen)) == len(seen) == 40
    assert seen != sorted(seen)


@pytest.mark.filterwarnings("error:This DataLoader will create")
@pytest.mark.parametrize(("workers", "start"), [(0, 1), (0, 9), (2, 1), (3, 4), (12, 7)])
def test_taking_an_epoch_up_again_gives_the_same_batches(data, workers, start):
    loader = data.train_loader(place(), Augment(), DataOptions(workers=workers), SIZE)
    same(list(loader.epoch(1))[start:], list(loader.epoch(1, start)))


def test_epochs_differ(data):
    loader = data.train_loader(place(), NOTHING, HERE, SIZE)
    assert [b.index.tolist() for b in loader.epoch(0)] != [b.index.tolist() for b in loader.epoch(1)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_each_test_image_once(data, workers, world):
    seen = {}
    for rank in range(world):
        loader = data.test_loader(place(4, rank, world), DataOptions(workers=workers, test_batch=2), SIZE)
        batches = list(loader.epoch(0))
        assert len(batches) == len(loader)
        for batch in batches:
            seen.update(zip(batch.index.tolist(), batch.targets.tolist(), strict=True))
    assert seen == {i: i % 3 for i in range(11)}


def test_test_images_are_those_of_a_folder(data, root, tmp_path):
    for part in ("train", "val"):
        for number in range(11):
            path = tmp_path / part / str(number % 3) / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_of(number))
    (ours,) = data.test_loader(place(), HERE, SIZE).epoch(0)
    (folder,) = open_data(str(tmp_path)).test_loader(place(), HERE, SIZE).epoch(0)
    by_class = sorted(range(11), key=lambda number: (number % 3, number))
    assert torch.equal(ours.images[by_class], folder.images)


def test_training_shards_alone_keep_a_fifth_for_testing(root):
    data = open_data(f"wds:{root}/train-{{00..04}}.tar")
    assert data.train_images + data.test_images == 41
    assert data.test_images in (7, 12, 3, 9, 10)


def test_validation_holds_out_shards(data):
    options = DataOptions(workers=0, validation=0.4)
    held = sum(len(batch) for batch in data.test_loader(place(), options, SIZE).epoch(0))
    assert len(data.train_loader(place(1), NOTHING, options, SIZE)) == 41 - held
    assert 0 < held < 41
    with pytest.raises(
        UserError, match=r"5 shards cannot be divided so that a share of 0.95 is for testing; add shards"
    ):
        data.train_loader(place(), NOTHING, DataOptions(validation=0.95), SIZE)


def test_sizes_and_classes_beside_the_shards_are_believed(root, tmp_path):
    write_shards(tmp_path, [4, 4])
    (tmp_path / "sizes.json").write_text(json.dumps({"train-00.tar": 4, "train-01.tar": 4}))
    (tmp_path / "classes.txt").write_text("cat\ndog\nbarn owl\n")
    data = open_data(f"wds:file:{tmp_path}/train-{{00..01}}.tar")
    assert data.classes == ("cat", "dog", "barn owl")
    (batch,) = data.test_loader(place(), HERE, SIZE).epoch(0)
    assert len(batch) == 4


def test_labels_by_name_and_in_json(tmp_path):
    for shard in range(2):
        samples = [
            ("a", {"png": image_of(0), "cls": b"owl"}),
            ("b", {"jpg": image_of(1), "json": b'{"label": "cat"}'}),
            ("c", {"txt": b"no image"}),
        ]
        write_shard(tmp_path / f"{shard}.tar", samples)
    data = open_data(f"wds:{tmp_path}/{{0,1}}.tar")
    assert data.classes == ("cat", "owl")
    (batch,) = data.test_loader(place(), HERE, SIZE).epoch(0)
    assert batch.targets.tolist() == [1, 0]


@pytest.mark.parametrize(("count", "buffer"), [(0, 5), (3, 5), (100, 5), (100, 0)])
def test_the_buffer_gives_each_number_once_and_soon(count, buffer):
    order = list(buffered_order(count, buffer, seed=1))
    assert sorted(order) == list(range(count))
    assert all(number <= place + buffer for place, number in enumerate(order))
    assert order == list(buffered_order(count, buffer, seed=1))


# Broken shards and images


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_cut_short_is_reported_and_the_rest_is_read(root, tmp_path, workers):
    write_shards(tmp_path, [6, 6, 6, 6])
    cut(tmp_path / "train-01.tar", (tmp_path / "train-01.tar").stat().st_size // 2)
    data = open_data(f"wds:{tmp_path}/train-{{00..03}}.tar::{root}/test-00.tar")
    assert 18 < data.train_images < 24
    loader = data.train_loader(place(2), NOTHING, DataOptions(workers=workers, max_broken=0.3), SIZE)
    assert loader.skipped == {"damaged shard": 1}
    assert sum(len(batch) for batch in loader.epoch(0)) == data.train_images // 2 * 2
    with pytest.raises(UserError, match=r"of the 24 images of wds:.* cannot be read \(1 damaged shard; first .*01.tar"):
        data.train_loader(place(2), NOTHING, HERE, SIZE)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.unlink(), "missing shard"),
        (lambda path: path.write_bytes(b"no tar" * 1000), "damaged shard"),
        (lambda path: cut(path, 5000), "damaged shard"),
        (
            lambda path: write_shard(path, [("a", {"png": image_of(0), "cls": b"0"})]),
            "shard with fewer images than said",
        ),
    ],
)
def test_a_shard_that_breaks_after_opening(root, tmp_path, workers, harm, reason):
    write_shards(tmp_path, [6, 6, 6, 6])
    data = open_data(f"wds:{tmp_path}/train-{{00..03}}.tar::{root}/test-00.tar")
    harm(tmp_path / "train-02.tar")
    loader = data.train_loader(place(4), NOTHING, DataOptions(workers=workers, max_broken=0.5), SIZE)
    batches = list(loader.epoch(0))
    assert [len(batch) for batch in batches] == [4] * 6  # as many steps as before: good ones take the place
    assert set(loader.skipped) == {reason}
    strict = data.train_loader(place(4), NOTHING, HERE, SIZE)
    with pytest.raises(UserError, match=f"cannot be read .1 {reason}; first .*train-02.tar"):
        list(strict.epoch(0))


def test_broken_images_in_good_shards(root, tmp_path):
    samples = [(f"{i}", {"png": image_of(i), "cls": b"%d" % (i % 3)}) for i in range(12)]
    samples[3][1]["png"] = b"no image"
    samples[7][1]["cls"] = b"\xff"
    samples[9][1].pop("cls")
    write_shard(tmp_path / "a.tar", samples)
    data = open_data(f"wds:{tmp_path}/a.tar::{root}/test-00.tar")
    options = DataOptions(workers=0, max_broken=0.3)
    loader = data.train_loader(place(4), NOTHING, options, SIZE)
    batches = list(loader.epoch(0))
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert loader.skipped == {"not an image": 1, "without a label": 2}
    assert not {3, 7, 9} & {i for batch in batches for i in batch.index.tolist()}
    same(batches[1:], list(loader.epoch(0, 1)))
    tester = open_data(f"wds:{root}/train-00.tar::{tmp_path}/a.tar").test_loader(place(), options, SIZE)
    (batch,) = tester.epoch(0)
    assert batch.index.tolist() == [0, 1, 2, 4, 5, 6, 8, 10, 11]


@pytest.mark.parametrize("label", ["7", "owl"])
def test_a_class_that_training_does_not_have(root, tmp_path, label):
    samples = [("a", {"png": image_of(0), "cls": label.encode()}), ("b", {"png": image_of(1), "cls": b"1"})]
    write_shard(tmp_path / "t.tar", samples)
    with pytest.raises(UserError, match=rf"t.tar holds a class that .*train-00.tar does not \({label}\); label them"):
        open_data(f"wds:{root}/train-00.tar::{tmp_path}/t.tar")
    # Believed where a file says so, and found out later.
    (tmp_path / "sizes.json").write_text('{"t.tar": 2}')
    (tmp_path / "classes.txt").write_text("0\n1\n2\n")
    loader = open_data(f"wds:{root}/train-00.tar::{tmp_path}/t.tar").test_loader(place(), HERE, SIZE)
    with pytest.raises(UserError, match=r"1 of the 2 images .* \(1 of an unknown class; first .*t.tar: a\)"):
        list(loader.epoch(0))


def test_names_that_are_numbers_beside_names_that_are_none(tmp_path):
    samples = [(str(i), {"png": image_of(i), "cls": label}) for i, label in enumerate([b"2", b"10", b"many", b""])]
    for i in range(2):
        write_shard(tmp_path / f"{i}.tar", samples)
    data = open_data(f"wds:{tmp_path}/{{0,1}}.tar")
    assert data.classes == ("10", "2", "many")
    loader = data.test_loader(place(), DataOptions(workers=0, max_broken=0.25), SIZE)
    (batch,) = loader.epoch(0)
    assert batch.targets.tolist() == [1, 0, 2]
    assert loader.skipped == {"without a label": 1}


# Texts that name no shards


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("wds:nowhere-{0..3}.tar", "there is no shard nowhere-0.tar; correct the path or the pattern"),
        ("wds:nowhere-*.tar", r"there is no shard nowhere-\*.tar"),
        ("wds:a-{0..3.tar", r"the braces of 'a-\{0..3.tar' do not match; write them as in train-\{0000..0099\}.tar"),
        ("wds:a.tar::", "names no shards; write wds:TRAIN.tar or wds:TRAIN.tar::TEST.tar"),
        ("wds:", "'wds:' names no data; write wds:TRAIN"),
    ],
)
def test_bad_patterns(text, sentence):
    with pytest.raises(UserError, match=sentence):
        open_data(text)


def test_some_shards_missing(root):
    with pytest.raises(UserError, match=r"2 of 7 shards are missing, first .*train-05.tar; correct the pattern"):
        open_data(f"wds:{root}/train-{{00..06}}.tar")


def test_shards_behind_a_url_need_their_sizes(root):
    with pytest.raises(UserError, match=r"what pipe:cat .* holds is not known; put sizes.json .* and classes.txt"):
        open_data(f"wds:pipe:cat {root}/train-{{00..01}}.tar")


def test_shards_without_images(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"hello"})])
    with pytest.raises(UserError, match=r"hold no images; put key.jpg beside key.cls in them"):
        open_data(f"wds:{tmp_path}/a.tar")


def test_shards_without_labels(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"png": image_of(0)})])
    with pytest.raises(UserError, match=r"a.tar and the shards like it have no labels; put key.cls beside key.jpg"):
        open_data(f"wds:{tmp_path}/a.tar")


def test_shards_that_are_none(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"a.tar and the shards like it are no tar files, or damaged; make or fetch"):
        open_data(f"wds:{tmp_path}/a.tar")


def test_shards_that_may_not_be_read(root, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied", "train-00.tar")

    monkeypatch.setattr(tarfile, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(.*Permission denied: 'train-00.tar'\); see that all of it"):
        open_data(f"wds:{root}/train-{{00..04}}.tar")


def test_one_class_only(tmp_path):
    for i in range(2):
        write_shard(tmp_path / f"{i}.tar", [("a", {"png": image_of(0), "cls": b"0"})])
    with pytest.raises(UserError, match="holds one class only"):
        open_data(f"wds:{tmp_path}/{{0,1}}.tar")


def test_one_shard_cannot_be_divided(root):
    with pytest.raises(UserError, match=r"1 shards cannot be divided .* give test shards with wds:TRAIN::TEST"):
        open_data(f"wds:{root}/train-00.tar")


@pytest.mark.parametrize("sizes", ["[1, 2]", '{"train-00.tar": -3}', '{"train-00.tar": null}', "3 images", ""])
def test_sizes_that_are_none(tmp_path, sizes):
    write_shards(tmp_path, [3])
    (tmp_path / "sizes.json").write_text(sizes)
    with pytest.raises(UserError, match="must say how many images each shard holds"):
        open_data(f"wds:{tmp_path}/train-00.tar")


def test_a_list_of_classes_is_read_or_refused(tmp_path):
    """Never passed over: labels would be numbered in another way without it."""
    write_shards(tmp_path, [6, 6])
    name = f"wds:{tmp_path}/train-{{00..01}}.tar"
    (tmp_path / "classes.txt").write_bytes("\ufeffowl\r\ncat\r\ndog\r\n".encode())
    assert open_data(name).classes == ("owl", "cat", "dog")
    (tmp_path / "classes.txt").write_bytes("caf\xe9\ncat\ndog\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"classes.txt is no UTF-8"):
        open_data(name)
    (tmp_path / "classes.txt").write_text("crane\ncat\ncrane\n")
    with pytest.raises(UserError, match="names two classes crane; give each a name of its own"):
        open_data(name)


def test_classes_that_are_numbered_otherwise_for_testing(tmp_path):
    """With labels that are numbers, images would be taken for others."""
    for part, classes in (("train", "cat\ndog\nowl\n"), ("val", "owl\ndog\ncat\n")):
        (tmp_path / part).mkdir()
        write_shards(tmp_path / part, [6])
        (tmp_path / part / "classes.txt").write_text(classes)
    name = f"wds:{tmp_path}/train/train-00.tar::{tmp_path}/val/train-00.tar"
    with pytest.raises(UserError, match=r"numbers classes otherwise than .*; make classes.txt alike"):
        open_data(name)
    (tmp_path / "val" / "classes.txt").write_text("cat\ndog\nowl\n")
    assert open_data(name).classes == ("cat", "dog", "owl")


def test_labels_that_number_no_classes(tmp_path):
    labels = (b"20240131", b"20240201")
    for i in range(2):
        write_shard(tmp_path / f"{i}.tar", [(str(k), {"png": image_of(k), "cls": labels[k]}) for k in range(2)])
    with pytest.raises(UserError, match="the label 20240201 is no class number; number classes from 0 on, or label by"):
        open_data(f"wds:{tmp_path}/{{0,1}}.tar")


def test_repeats_are_refused(data):
    with pytest.raises(UserError, match=r"images cannot be repeated; set augment.repeats=1"):
        data.train_loader(place(), Augment(repeats=3), HERE, SIZE)


# Behind a URL


@pytest.fixture
def server(tmp_path):
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(tmp_path))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="webdataset fetches URLs with curl")
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_over_http(tmp_path, server, workers):
    write_shards(tmp_path, [5, 4, 6, 5])
    with pytest.raises(UserError, match=r"what http://.*train-00.tar holds is not known; put sizes.json"):
        open_data(f"wds:{server}/train-{{00..03}}.tar")
    sizes = {f"train-{i:02d}.tar": size for i, size in enumerate([5, 4, 6, 5])}
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    data = open_data(f"wds:{server}/train-{{00..02}}.tar::{server}/train-03.tar")
    loader = data.train_loader(place(3), NOTHING, DataOptions(workers=workers, max_broken=0.5), SIZE)
    seen = [i for batch in loader.epoch(0) for i in batch.index.tolist()]
    assert sorted(seen) == list(range(15))
    assert not loader.skipped
    (tmp_path / "train-01.tar").unlink()
    assert [len(batch) for batch in loader.epoch(0)] == [3] * 5
    assert loader.skipped == {"damaged shard": 1}
