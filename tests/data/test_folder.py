"""Image folders: what is found, in what order it comes, and what happens to files that cannot be read."""

import io
import os
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from vitrefine.data.dataset import Place
from vitrefine.data.open import open_data
from vitrefine.data.options import NOTHING, Augment, DataOptions
from vitrefine.data.picture import read_picture
from vitrefine.errors import UserError

CPU = torch.device("cpu")
HERE = DataOptions(workers=0)
SIZE = (32, 32)


def place(batch=8, rank=0, world=1, seed=3):
    return Place(batch, rank, world, CPU, seed)


def write_image(path, seed, size=(40, 36)):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((36, 40)).save(path)


def write_set(root, counts, classes=("cat", "dog", "owl")):
    for part, count in counts.items():
        for label, name in enumerate(classes):
            for i in range(count):
                write_image(root / part / name / f"{i:03d}.png", seed=1000 * label + i)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("images"), {"train": 12, "val": 5})


def batches(data, options=HERE, augment=None, epoch=0, start=0, where=None):
    return list(data.train_loader(where or place(), augment or Augment(), options, SIZE).epoch(epoch, start))


def same(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.index, b.index)


def test_what_is_found(root):
    data = open_data(f"folder:{root}")
    assert data.classes == ("cat", "dog", "owl")
    assert (data.train_images, data.test_images, data.size, data.channels) == (36, 15, None, 3)
    assert open_data(str(root)).fingerprint == data.fingerprint
    (batch,) = data.test_loader(place(), HERE, SIZE).epoch(0)
    assert batch.targets.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert batch.index.tolist() == list(range(15))
    assert batch.images.shape == (15, 3, 32, 32)


@pytest.mark.parametrize("form", ["~/{}", "folder:~/{}"])
def test_the_users_folder(root, monkeypatch, form):
    monkeypatch.setenv("HOME", str(root.parent))
    assert open_data(form.format(root.name)).train_images == 36


def test_test_images_are_timms(root):
    from timm.data import create_transform

    (batch,) = open_data(str(root)).test_loader(place(), HERE, SIZE).epoch(0)
    transform = create_transform((3, *SIZE), is_training=False, interpolation="bicubic", crop_pct=0.875)
    with Image.open(root / "val" / "dog" / "002.png") as image:
        torch.testing.assert_close(batch.images[7], transform(image.convert("RGB")), rtol=1e-5, atol=1e-5)


def test_without_augmentation_an_image_is_itself(tmp_path):
    write_set(tmp_path, {"": 5})
    data = open_data(str(tmp_path))
    (batch,) = batches(data, augment=NOTHING, where=place(12))
    for image, number in zip(batch.images, batch.index.tolist(), strict=True):
        shown = image * torch.tensor(data.std).view(3, 1, 1) + torch.tensor(data.mean).view(3, 1, 1)
        with Image.open(data.train_source.name_of(number)) as file:
            resized = np.array(file.resize((32, 35), Image.Resampling.BICUBIC).crop((0, 2, 32, 34)))
        torch.testing.assert_close(shown * 255, torch.from_numpy(resized).permute(2, 0, 1).float(), rtol=0, atol=0.01)


@pytest.mark.parametrize("augment", [Augment(), Augment(crop="pad", repeats=3, rand_augment=4.5)])
def test_workers_and_resumption_change_nothing(root, augment):
    data = open_data(str(root))
    whole = batches(data, augment=augment, epoch=1)
    same(whole, batches(data, DataOptions(workers=2), augment, epoch=1))
    same(whole[2:], batches(data, augment=augment, epoch=1, start=2))
    assert not torch.equal(whole[0].images, batches(data, augment=augment, epoch=2)[0].images)


def test_reading_leaves_the_randomness_of_the_process_alone(root):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    batches(open_data(str(root)))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_two_processes_see_what_one_sees(root):
    data = open_data(str(root))
    alone = batches(data, augment=NOTHING)
    halves = [batches(data, augment=NOTHING, where=place(4, rank, 2)) for rank in (0, 1)]
    for one, left, right in zip(alone, *halves, strict=True):
        assert torch.equal(one.images, torch.cat([left.images, right.images]))


def test_class_folders_alone_keep_a_fifth_for_testing(tmp_path):
    write_set(tmp_path, {"": 10})
    data = open_data(str(tmp_path))
    assert (data.train_images, data.test_images) == (24, 6)
    assert data.test_source.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert not set(data.train_source.file_names()) & set(data.test_source.file_names())


def test_validation_holds_out_training_images(root):
    data, options = open_data(str(root)), DataOptions(workers=0, validation=0.25)
    assert len(data.train_loader(place(9), NOTHING, options, SIZE)) == 3
    tested = torch.cat([b.targets for b in data.test_loader(place(), options, SIZE).epoch(0)])
    assert tested.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    trained = {i for b in batches(data, options, NOTHING, where=place(1)) for i in b.index.tolist()}
    assert len(trained) == 27
    with pytest.raises(UserError, match=r"a validation share of 0.01 of 36 images leaves one part empty"):
        data.train_loader(place(), NOTHING, DataOptions(validation=0.01), SIZE)


def test_the_fingerprint_knows_names_and_sizes(tmp_path):
    write_set(tmp_path, {"train": 2, "test": 2})
    first = open_data(str(tmp_path)).fingerprint
    (tmp_path / "train" / "cat" / "000.png").rename(tmp_path / "train" / "cat" / "100.png")
    second = open_data(str(tmp_path)).fingerprint
    write_image(tmp_path / "test" / "dog" / "000.png", seed=5, size=(9, 9))
    assert len({first, second, open_data(str(tmp_path)).fingerprint}) == 3


def test_files_that_are_no_images_are_passed_over(tmp_path):
    write_set(tmp_path, {"train": 3, "val": 1})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("hello")
    (tmp_path / "train" / "cat" / "._000.png").write_bytes(b"made by a file manager")
    (tmp_path / "train" / ".cache").mkdir()
    write_image(tmp_path / "train" / "cat" / "more" / "UPPER.JPG", seed=1)
    write_image(tmp_path / "train" / "cat" / ".thumbnails" / "000.png", seed=1)
    data = open_data(str(tmp_path))
    assert data.train_images == 10
    assert "cat/more/UPPER.JPG" in data.train_source.file_names()


# Broken images


@pytest.fixture
def hurt(tmp_path):
    write_set(tmp_path, {"train": 10, "val": 4})
    photo = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(photo, "JPEG")
    (tmp_path / "train" / "cat" / "003.png").write_bytes(photo.getvalue()[:-500])
    (tmp_path / "train" / "dog" / "009.png").write_bytes(b"")
    (tmp_path / "val" / "owl" / "001.png").write_bytes(b"no image at all")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_counted_and_replaced_by_the_next(hurt, workers):
    options = DataOptions(workers=workers, max_broken=0.1)
    loader = open_data(str(hurt)).train_loader(place(6), NOTHING, options, SIZE)
    for epoch in (0, 1):
        read = list(loader.epoch(epoch))
        assert [len(batch) for batch in read] == [6] * 5
        seen = torch.cat([batch.index for batch in read]).bincount(minlength=30)
        assert seen[3] == seen[19] == 0
        assert seen[4] == seen[20] == 2
        assert (seen.sum(), seen.max()) == (30, 2)
        assert loader.skipped == {"truncated": 1, "empty": 1}  # each once, however often it is met


def test_resumption_is_exact_with_broken_images(hurt):
    data, options = open_data(str(hurt)), DataOptions(workers=0, max_broken=0.1)
    same(batches(data, options)[1:], batches(data, options, start=1))


def test_broken_test_images_are_left_out(hurt):
    loader = open_data(str(hurt)).test_loader(place(), DataOptions(workers=0, test_batch=5, max_broken=0.1), SIZE)
    index = torch.cat([batch.index for batch in loader.epoch(0)]).tolist()
    assert index == [i for i in range(12) if i != 9]
    assert loader.skipped == {"not an image": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_broken_images_stop_with_a_sentence(hurt, workers):
    loader = open_data(f"folder:{hurt}").train_loader(place(6), NOTHING, DataOptions(workers=workers), SIZE)
    with pytest.raises(UserError) as caught:
        list(loader.epoch(0))
    sentence = str(caught.value)
    assert f" of the 30 images of folder:{hurt} cannot be read (1 " in sentence
    assert "data.max_broken = 0.01 allows 0; mend or remove them" in sentence
    assert "003.png" in sentence or "009.png" in sentence


def test_nothing_but_broken_images(tmp_path):
    for name in "ab":
        for i in range(4):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{i}.jpg").write_bytes(b"x")
    data = open_data(str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be read \(\d not an image; first "):
        list(data.train_loader(place(2), Augment(), DataOptions(workers=0, max_broken=0.9), SIZE).epoch(0))
    loader = data.test_loader(place(), DataOptions(workers=0, max_broken=1.0), SIZE)
    assert list(loader.epoch(0)) == []
    assert loader.skipped == {"not an image": 1}


def test_a_file_that_vanishes_is_broken(root, tmp_path):
    write_set(tmp_path, {"train": 3, "val": 1})
    data = open_data(str(tmp_path))
    (tmp_path / "train" / "owl" / "001.png").unlink()
    loader = data.train_loader(place(3), NOTHING, DataOptions(workers=0, max_broken=0.5), SIZE)
    list(loader.epoch(0))
    assert loader.skipped == {"missing": 1}


@pytest.mark.parametrize("target", [".", "..", "../cat"])
def test_links_are_followed_and_never_in_a_circle(tmp_path, target):
    write_set(tmp_path / "set", {"": 5})
    write_image(tmp_path / "more" / "cats" / "x.png", seed=1)
    (tmp_path / "set" / "cat" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "set" / "cat" / "again").symlink_to(target)
    data = open_data(str(tmp_path / "set"))
    assert data.train_images + data.test_images == 16


def test_names_beyond_ascii(tmp_path):
    write_set(tmp_path, {"train": 3, "val": 1}, classes=("čáp", "sova"))
    odd = os.fsencode(tmp_path / "train" / "sova") + b"/caf\xe9.png"
    shutil.copy(tmp_path / "train" / "sova" / "000.png", odd)
    data = open_data(str(tmp_path))
    assert data.classes == ("sova", "čáp")
    assert sum(len(batch) for batch in batches(data, where=place(7))) == 7
    # What is written into a run has to be UTF-8.
    os.rename(tmp_path / "train" / "sova", os.fsencode(tmp_path / "train") + b"/caf\xe9")
    with pytest.raises(UserError, match=r"the name of the class folder 'caf\\udce9' in .*train is no UTF-8; rename it"):
        open_data(str(tmp_path))
    with pytest.raises(UserError, match=r"'folder:caf\\udce9' is no UTF-8, in which a run's files are written; rename"):
        open_data("folder:caf\udce9")


def test_what_cameras_note_wrongly_is_no_matter(tmp_path):
    write_set(tmp_path, {"train": 1, "val": 1})
    exif = Image.Exif()
    exif[0x010E], exif[0x0112] = "a note" * 9, 3
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, "JPEG", exif=exif)
    photo = bytearray(file.getvalue())
    photo[photo.index(b"Exif") + 14] = 200  # so many notes there are not
    (tmp_path / "train" / "cat" / "000.png").write_bytes(photo)
    with pytest.warns(UserWarning, match="Corrupt EXIF data"):
        read_picture(bytes(photo))
    warnings.filterwarnings("error", message="Corrupt EXIF data")
    assert len(batches(open_data(str(tmp_path)), DataOptions(workers=1), where=place(3))) == 1


# Folders that are none


def test_no_such_folder():
    with pytest.raises(UserError, match="there is no folder nowhere; give one that holds a folder of images for each"):
        open_data("folder:nowhere")


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"is empty; give a folder that holds a folder of images for each class"):
        open_data(str(tmp_path))


def test_images_without_class_folders(tmp_path):
    write_image(tmp_path / "1.png", 0)
    with pytest.raises(UserError, match="are in no class folders; put those of each class into one of its name"):
        open_data(str(tmp_path))


def test_one_class_only(tmp_path):
    write_set(tmp_path, {"": 3}, classes=("cat",))
    with pytest.raises(UserError, match=r"holds one class only \(cat\); at least two are needed"):
        open_data(str(tmp_path))


def test_no_images(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match=r"holds no images; files that end in .avif, .bmp"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("part", ["", "train"])
def test_a_class_without_images(tmp_path, part):
    write_set(tmp_path, {part: 5, **({"val": 1} if part else {})})
    (tmp_path / part / "elk").mkdir()
    with pytest.raises(UserError, match=r"elk holds no images; add some, or remove it"):
        open_data(str(tmp_path))


def test_a_test_part_may_lack_classes(tmp_path):
    write_set(tmp_path, {"train": 2})
    write_set(tmp_path, {"val": 2}, classes=("dog",))
    assert open_data(str(tmp_path)).test_source.labels.tolist() == [1, 1]


def test_too_few_images_to_divide(tmp_path):
    write_set(tmp_path, {"": 1})
    with pytest.raises(UserError, match=r"has too few images \(3\) to keep a fifth for testing; add some"):
        open_data(str(tmp_path))


@pytest.mark.parametrize(("train", "test"), [("training", "validation"), ("Train", "Test")])
def test_parts_of_other_names_are_not_taken_for_classes(tmp_path, train, test):
    write_set(tmp_path, {train: 2, test: 2})
    with pytest.raises(UserError, match=rf"holds {test} but no train; call the folder of the training images train"):
        open_data(str(tmp_path))


def test_classes_may_be_called_as_parts_are(tmp_path):
    write_set(tmp_path, {"": 5}, classes=("invalid", "valid"))
    assert open_data(str(tmp_path)).classes == ("invalid", "valid")


def test_what_may_not_be_read(root, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        with pytest.raises(
            UserError, match=r"cannot be read \(.*Permission denied: .*; see that all of it is there and"
        ):
            open_data(str(root))
    with pytest.raises(UserError, match=r"there is no folder ~nobody-has-this-name/photos"):
        open_data("folder:~nobody-has-this-name/photos")


def test_classes_of_train_and_test_differ(tmp_path):
    write_set(tmp_path, {"train": 2}, classes=("cat", "dog"))
    write_set(tmp_path, {"val": 2}, classes=("cats", "dogs"))
    with pytest.raises(UserError, match=r"holds classes that .*train does not \(cats, dogs\); name them alike"):
        open_data(str(tmp_path))


def test_train_without_test(tmp_path):
    write_set(tmp_path, {"train": 2})
    with pytest.raises(UserError, match="holds train but none of val, valid, validation, test; add one, or give"):
        open_data(str(tmp_path))


def test_a_size_of_nothing(root):
    with pytest.raises(UserError, match="images of 0×32 pixels cannot be made"):
        open_data(str(root)).test_loader(place(), HERE, (0, 32))


@pytest.mark.parametrize("crop", ["resized", "pad", "none"])
@pytest.mark.parametrize("size", [(24, 24), (24, 40)])
def test_every_crop_gives_the_size(root, crop, size):
    loader = open_data(str(root)).train_loader(place(), Augment(crop=crop), HERE, size)
    batch = next(loader.epoch(0))
    assert batch.images.shape == (8, 3, *size)
    torch.testing.assert_close(batch.targets.sum(dim=1), torch.ones(8))


def test_a_link_to_nowhere_is_a_broken_image(tmp_path):
    write_set(tmp_path, {"train": 4, "val": 1})
    (tmp_path / "train" / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    data = open_data(f"folder:{tmp_path}")
    assert data.fingerprint
    loader = data.train_loader(place(3), Augment(), DataOptions(workers=0, max_broken=0.2), SIZE)
    assert len(list(loader.epoch(0))) == len(loader)
    assert sum(loader.skipped.values()) == 1
