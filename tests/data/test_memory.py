"""The loader of sets in memory: order, resumption, sizes, and what its images are."""

import pytest
import torch

from vitrefine.data.dataset import Place
from vitrefine.data.memory import MemorySet
from vitrefine.data.open import FORMS, open_data
from vitrefine.data.options import NOTHING, Augment, DataOptions
from vitrefine.errors import UserError

CPU = torch.device("cpu")


def place(batch=16, rank=0, world=1, seed=3):
    return Place(batch, rank, world, CPU, seed)


@pytest.fixture(scope="module")
def data():
    return open_data("digits")


def test_what_it_says_of_itself(data):
    assert (data.name, data.size, data.channels) == ("digits", (32, 32), 3)
    assert (data.train_images, data.test_images, len(data.classes)) == (1438, 359, 10)
    assert data.fingerprint == open_data("digits").fingerprint
    assert len(data.fingerprint) == 16


def test_images_are_normalised_and_labelled(data):
    batches = list(data.train_loader(place(1438), NOTHING, DataOptions(), (32, 32)).epoch(0))
    (batch,) = batches
    assert batch.images.dtype == torch.float32
    assert batch.images.mean().abs() < 1e-5
    assert (batch.images.std() - 1).abs() < 1e-3
    assert torch.equal(batch.index.sort().values, torch.arange(1438))
    labels = data._arrays.train.labels[batch.index]
    assert torch.equal(batch.targets, torch.nn.functional.one_hot(labels, 10).float())


@pytest.mark.parametrize("augment", [Augment(), Augment(crop="pad", repeats=3), NOTHING])
def test_taking_an_epoch_up_again_gives_the_same_batches(data, augment):
    def loader():
        return data.train_loader(place(), augment, DataOptions(), (32, 32))

    whole = list(loader().epoch(2))
    rest = list(loader().epoch(2, start=80))
    assert len(whole) == len(loader()) == 1438 // 16
    assert len(rest) == len(whole) - 80
    for once, again in zip(whole[80:], rest, strict=True):
        assert torch.equal(once.images, again.images)
        assert torch.equal(once.targets, again.targets)
        assert torch.equal(once.index, again.index)
    assert not torch.equal(whole[0].images, next(iter(loader().epoch(3))).images)


def test_two_processes_see_what_one_sees(data):
    alone = data.train_loader(place(32), NOTHING, DataOptions(), (32, 32)).epoch(0)
    first, second = (data.train_loader(place(16, r, 2), NOTHING, DataOptions(), (32, 32)).epoch(0) for r in (0, 1))
    for one, left, right in zip(alone, first, second, strict=True):
        assert torch.equal(one.images, torch.cat([left.images, right.images]))
        assert torch.equal(one.targets, torch.cat([left.targets, right.targets]))


def test_ranks_draw_different_augmentation(data):
    augment = NOTHING.model_copy(update={"erasing": 1.0})
    left, right = (next(data.train_loader(place(16, r, 2), augment, DataOptions(), (32, 32)).epoch(0)) for r in (0, 1))
    assert not torch.equal(left.images, right.images)


@pytest.mark.parametrize("crop", ["resized", "pad", "none"])
@pytest.mark.parametrize("size", [(24, 24), (48, 40)])
def test_the_wanted_size_comes_out(data, crop, size):
    batch = next(data.train_loader(place(8), Augment(crop=crop), DataOptions(), size).epoch(0))
    assert batch.images.shape == (8, 3, *size)
    assert batch.images.isfinite().all()
    torch.testing.assert_close(batch.targets.sum(dim=1), torch.ones(8))
    tested = next(data.test_loader(place(), DataOptions(test_batch=8), size).epoch(0))
    assert tested.images.shape == (8, 3, *size)


@pytest.mark.parametrize("world", [1, 3])
def test_each_test_image_is_seen_once_in_order(data, world):
    seen = {}
    for rank in range(world):
        loader = data.test_loader(place(4, rank, world), DataOptions(test_batch=100), (32, 32))
        batches = list(loader.epoch(0))
        assert len(loader) == len(batches)
        for batch in batches:
            seen.update(zip(batch.index.tolist(), batch.targets.tolist(), strict=True))
    assert [seen[i] for i in range(359)] == data._arrays.test.labels.tolist()


def test_validation_takes_the_place_of_the_test_images(data):
    options = DataOptions(validation=0.25)
    trained = data.train_loader(place(2), NOTHING, options, (32, 32))
    tested = list(data.test_loader(place(), options, (32, 32)).epoch(0))
    assert sum(len(batch) for batch in tested) == int(1438 * 0.25)
    images = {image.numpy().tobytes() for batch in trained.epoch(0) for image in batch.images}
    held = [image.numpy().tobytes() for batch in tested for image in batch.images]
    assert len(trained) == (1438 - 359) // 2
    assert sum(image in images for image in held) < 5  # a few digits of the set are equal to one another


def test_a_crop_ratio_above_one_pads_with_black(data):
    plain = next(data.test_loader(place(), DataOptions(), (32, 32)).epoch(0)).images
    padded = next(data.test_loader(place(), DataOptions(crop_ratio=1.25), (40, 40)).epoch(0)).images
    assert torch.equal(padded[..., 4:-4, 4:-4], plain)
    black = -torch.tensor(data.mean) / torch.tensor(data.std)
    torch.testing.assert_close(padded[:, :, 0, 0], black.expand(len(padded), 3))


def test_an_image_without_pixels(data):
    for size in [(0, 32), (32, -1)]:
        with pytest.raises(UserError, match=r"pixels cannot be made; give a size of at least 1"):
            data.train_loader(place(), NOTHING, DataOptions(), size)
        with pytest.raises(UserError, match="at least 1"):
            data.test_loader(place(), DataOptions(), size)


def test_the_fingerprint_is_of_the_content():
    from vitrefine.data.arrays import ArraySet, Split, digits

    arrays = digits()
    changed = arrays.train.images.clone()
    changed[0, 0, 0, 0] += 1
    other = ArraySet("digits", Split(changed, arrays.train.labels), arrays.test, arrays.classes)
    assert MemorySet("a", arrays).fingerprint == MemorySet("b", arrays).fingerprint
    assert MemorySet("a", arrays).fingerprint != MemorySet("a", other).fingerprint


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mnist", "there is no data set or folder 'mnist'; give one of digits, cifar10:PATH"),
        ("cifar10", r"'cifar10' names no data; write cifar10:PATH"),
        ("cifar100:", r"'cifar100:' names no data; write cifar100:PATH"),
        ("cifar10:nowhere", "there is no nowhere; give the folder or file that holds cifar10"),
        ("s3:bucket", "there is no data set or folder 's3:bucket'"),
        ("", "there is no data set or folder ''"),
    ],
)
def test_unknown_data_gets_a_sentence(text, sentence):
    with pytest.raises(UserError, match=sentence):
        open_data(text)


def test_every_form_is_listed_and_opened():
    from vitrefine.data.open import _OPENERS

    assert {form.partition(":")[0] for form in FORMS} == {"digits", *_OPENERS}
