"""Which images are tested, and that their pixels are the bytes of the set."""

import io
import tarfile

import pytest
import torch
from PIL import Image

from vitrefine.data.open import open_data
from vitrefine.errors import UserError
from vitrefine.evaluate.images import ImageSet

from .conftest import small_set


def numbers(images: ImageSet) -> list[int]:
    return [number for _, shown in images.batches((8, 8), 1.0) for number in shown.index.tolist()]


def make(data, **options) -> ImageSet:
    return ImageSet(data, torch.device("cpu"), **{"batch": 7, "workers": 0, **options})


def test_pixels_are_bytes(data):
    bare = torch.cat([shown.pixels for _, shown in make(data).batches((8, 8), 1.0)])
    assert torch.equal(bare, data._arrays.test.images.float() / 255)


def test_all(data):
    assert numbers(make(data)) == list(range(60))


@pytest.mark.parametrize("limit", [1, 10, 59, 60, 1000])
def test_limit(data, limit):
    images = make(data, limit=limit)
    found = numbers(images)
    assert len(found) == len(images) == min(limit, 60)
    assert len(set(found)) == len(found)


def test_a_limit_is_drawn_at_random_and_repeatable():
    data = small_set(images=5000)
    first, again, other = (numbers(make(data, limit=50, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 50
    assert max(first) > 4000
    assert len({number % 10 for number in first}) == 10  # sets often come in rounds of classes


def test_a_limit_does_not_depend_on_the_batch():
    data = small_set(images=500)
    assert numbers(make(data, limit=50, batch=7)) == numbers(make(data, limit=50, batch=64))


def test_taken_up_in_the_middle(data):
    images = make(data, limit=40)
    whole = list(images.batches((8, 8), 1.0))
    for start in range(1, len(whole)):
        rest = list(images.batches((8, 8), 1.0, start))
        assert [number for number, _ in rest] == [number for number, _ in whole[start:]]
        for (_, one), (_, other) in zip(rest, whole[start:], strict=True):
            assert torch.equal(one.index, other.index)


def test_padding_is_black_around_the_whole_image(data):
    """A ratio of 2 shows an image of half the size, and zeros around it."""
    _, shown = next(iter(make(data).batches((8, 8), 2.0)))
    inner = shown.pixels[:, :, 2:6, 2:6]
    assert float(inner.mean()) > 0.3
    assert float(shown.pixels.sum()) == pytest.approx(float(inner.sum()))


def test_complaints(data):
    with pytest.raises(UserError, match="--limit is 0"):
        make(data, limit=0)


IMAGES = 200


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Red tells an image's number, its class the half that it is in."""
    root = tmp_path_factory.mktemp("pictures")
    for part, count in (("train", 2), ("val", IMAGES)):
        for number in range(count):
            folder = root / part / str(number * 2 // count)
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:03d}.bmp")
    return root


@pytest.mark.parametrize("limit", [None, 30, 120])
@pytest.mark.parametrize("broken", [(0,), (0, 1), (100,), (101,), (100, 101), (198, 199)])
def test_a_broken_image_costs_no_other_its_place(pictures, broken, limit):
    """Batches are of two images, so a pair of broken ones is a batch that does not come at all."""
    chosen = set(numbers(make(open_data(str(pictures)), limit=limit, batch=2)))
    files = [pictures / "val" / str(number * 2 // IMAGES) / f"{number:03d}.bmp" for number in broken]
    contents = [file.read_bytes() for file in files]
    try:
        for file in files:
            file.write_bytes(b"")
        images = make(open_data(str(pictures)), limit=limit, batch=2)
        whole = list(images.batches((8, 8), 1.0))
        assert [number for _, shown in whole for number in shown.index.tolist()] == sorted(chosen - {*broken})
        for _, shown in whole:
            assert (shown.pixels[:, 0] * 255).round().amax(dim=(1, 2)).tolist() == shown.index.tolist()
            assert (shown.index * 2 // IMAGES).tolist() == shown.targets.tolist()
        for done in (1, len(whole) // 2, len(whole) // 2 + 2, len(whole) - 1):
            rest = images.batches((8, 8), 1.0, whole[done - 1][0])
            found = [number for _, shown in [*whole[:done], *rest] for number in shown.index.tolist()]
            assert set(found) == chosen - {*broken}
    finally:
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)


def write_shard(path, images, broken=(), first_class=0):
    with tarfile.open(path, "w") as archive:
        for number in range(images):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 0, 0)).save(picture, "BMP")
            for ending, content in (
                ("bmp", b"x" if number in broken else picture.getvalue()),
                ("cls", str((number + first_class) % 2).encode()),
            ):
                member = tarfile.TarInfo(f"{number:03d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    pytest.importorskip("webdataset")
    root = tmp_path_factory.mktemp("shards")
    write_shard(root / "train.tar", 2)
    write_shard(root / "test.tar", IMAGES, broken=(4, 5))
    return open_data(f"wds:{root}/train.tar::{root}/test.tar")


def test_shards_made_anew_are_told_from_the_old_ones(tmp_path):
    """Under the same name, with as many images, and as large."""
    pytest.importorskip("webdataset")
    name = f"wds:{tmp_path}/train.tar::{tmp_path}/test.tar"
    write_shard(tmp_path / "train.tar", 2)
    keys = []
    for first_class in (0, 1):
        write_shard(tmp_path / "test.tar", 10, first_class=first_class)
        keys += [make(open_data(name)).key, make(open_data(name)).key]
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_of_shards_the_same_come_whoever_reads_them(shards):
    """Each process reads a stretch of its own, so batches hold other images."""
    alone, together = (make(shards, limit=60, batch=2, workers=workers) for workers in (0, 2))
    found = [sorted(numbers(images)) for images in (alone, together)]
    assert found[0] == found[1]
    assert 58 <= len(found[0]) <= 60
    assert alone.dealt != together.dealt
