"""Predictions are computed once, can be interrupted, and do not depend on how they came about."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitrefine.data.open import open_data
from vitrefine.errors import UserError
from vitrefine.evaluate import predictions as module
from vitrefine.evaluate.cache import Cache, default_folder
from vitrefine.evaluate.change import Unchanged
from vitrefine.evaluate.noise import GaussianNoise
from vitrefine.evaluate.predictions import fetched

from .conftest import Interrupted, Linear, small_set


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=False))


class Counting(Linear):
    def __init__(self):
        super().__init__()
        self.images = 0

    def forward(self, images):
        self.images += len(images)
        return super().forward(images)


def test_what_is_predicted(examiner, data):
    found = examiner().predict()
    model = Linear()
    mean, std = (torch.tensor(x).view(1, -1, 1, 1) for x in (data.mean, data.std))
    logits = model((data._arrays.test.images / 255 - mean) / std)
    assert found.index.tolist() == list(range(60))
    assert found.best.tolist() == logits.topk(5).indices.tolist()
    assert np.allclose(found.confidence, logits.softmax(1).amax(1).detach(), atol=1e-5)
    assert np.array_equal(found.target, data._arrays.test.labels)


def test_a_second_time_comes_from_the_cache(examiner, tmp_path):
    model = Counting()
    first = examiner(model, cache=Cache(tmp_path)).predict()
    assert model.images == 60
    again = examiner(model, cache=Cache(tmp_path)).predict()
    assert model.images == 60
    assert same(first, again)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_changes_them_is_in_the_key(examiner, tmp_path):
    model, cache = Counting(), Cache(tmp_path)
    examiner(model, cache=cache).predict()
    examiner(model, cache=cache).predict(crop_ratio=0.9)
    examiner(model, cache=cache).predict(GaussianNoise(5))
    examiner(model, cache=cache).predict(GaussianNoise(5, seed=1))
    examiner(model, cache=cache, limit=20).predict()
    examiner(model, cache=cache, limit=20, seed=1).predict()
    assert model.images == 4 * 60 + 2 * 20
    other = small_set()
    other._arrays.test.labels[0] += 1
    examiner(model, other, cache=cache).predict()
    assert model.images == 5 * 60 + 2 * 20
    with torch.no_grad():
        model.weight[0, 0] += 1
    examiner(model, cache=cache).predict()
    assert model.images == 6 * 60 + 2 * 20
    tester = examiner(model, cache=cache)
    dataclasses.replace(tester, subject=dataclasses.replace(tester.subject, precision="bf16")).predict()
    assert model.images == 7 * 60 + 2 * 20


def test_an_image_edited_in_place_is_predicted_anew(examiner, tmp_path):
    """Of the same name and size: uncompressed images always are."""
    for i in range(20):
        place = tmp_path / "data" / str(i % 10)
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(place / f"{i}.bmp")

    def predict():
        data = open_data(str(tmp_path / "data"))
        return examiner(None, data, size=(8, 8), cache=Cache(tmp_path / "cache")).predict()

    first = predict()
    assert same(predict(), first)
    for path in (tmp_path / "data").rglob("*.bmp"):
        Image.new("RGB", (8, 8), (0, 255, 0)).save(path)
    assert not same(predict(), first)


def test_scores_are_fetched_once_and_not_for_each_batch(examiner, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "fetched", lambda scores: calls.append(len(scores)) or fetched(scores))
    examiner(batch=16).predict()
    assert calls == [4]


def test_comparisons_are_of_the_same_images(examiner):
    tester, fewer = examiner(), examiner(limit=20)
    assert same(tester.predict_again(tester.predict()), tester.predict())
    with pytest.raises(UserError, match="some images of small could be read one time and not another"):
        tester.predict_again(fewer.predict())


def test_a_ruled_out_class_is_no_fault(examiner):
    class Cautious(Linear):
        def forward(self, images):
            logits = super().forward(images)
            return torch.where(torch.arange(10) == 3, -torch.inf, logits)

    data = small_set()
    data._arrays.test.labels.clamp_(max=2)
    assert (examiner(Cautious(), data).predict().best[:, 0] != 3).all()


def test_a_damaged_file_is_made_again(examiner, tmp_path):
    first = examiner(cache=Cache(tmp_path)).predict()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for damaged in (b"", b"nonsense", content[: len(content) // 2]):
        file.write_bytes(damaged)
        assert same(examiner(cache=Cache(tmp_path)).predict(), first)
    assert file.read_bytes() == content


@pytest.mark.parametrize("after", [0, 1, 3])
def test_interrupted_work_goes_on_where_it_was(examiner, data, tmp_path, after):
    noise = GaussianNoise(10)
    whole = examiner(batch=4).predict(noise)
    reader, model = Interrupted(data, after, times=2), Counting()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            examiner(model, reader, cache=Cache(tmp_path), batch=4).predict(noise)
    found = examiner(model, reader, cache=Cache(tmp_path), batch=4).predict(noise)
    assert same(found, whole)
    assert model.images == 60  # none of them twice
    assert len(list(tmp_path.iterdir())) == 1  # and no parts left behind


def test_parts_are_kept_while_it_works(examiner, data, tmp_path, monkeypatch):
    """A kill leaves no time to write anything."""
    monkeypatch.setattr(module, "_KEEP_EVERY", 0.0)

    class Killed(BaseException):
        pass

    def kill(what, done, of):
        if done == 48:
            raise Killed

    with pytest.raises(Killed):
        examiner(Counting(), cache=Cache(tmp_path), watch=kill).predict()
    model = Counting()
    assert same(examiner(model, cache=Cache(tmp_path)).predict(), examiner().predict())
    assert model.images == 60 - 32


def test_parts_of_another_batch_size_are_not_mixed_in(examiner, data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        examiner(None, Interrupted(data, 2), cache=Cache(tmp_path)).predict()
    found = examiner(cache=Cache(tmp_path), batch=7).predict()
    assert same(found, examiner().predict())


@pytest.mark.parametrize("limit", [None, 60])
def test_interrupted_beside_broken_images(examiner, tmp_path, limit):
    """Two of them are a batch of which nothing comes: what is kept and what is read later must still fit together."""
    for part, count in (("train", 10), ("val", 200)):
        for i in range(count):
            place = tmp_path / "data" / part / str(i * 10 // count)
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (i, 255 - i, 0)).save(place / f"{i:03d}.bmp")
    for i in (40, 41):
        (tmp_path / "data" / "val" / "2" / f"{i:03d}.bmp").write_bytes(b"")
    data = open_data(str(tmp_path / "data"))
    options = {"size": (8, 8), "batch": 2, "limit": limit}
    whole = examiner(None, data, **options).predict()
    assert (whole.index * 10 // 200).tolist() == whole.target.tolist()
    assert not {40, 41} & set(whole.index.tolist())
    for after in (5, 19, 20, 21, 30, 70):
        cache = Cache(tmp_path / f"cache{after}")
        with pytest.raises(KeyboardInterrupt):
            examiner(None, Interrupted(data, after), cache=cache, **options).predict()
        assert same(examiner(None, data, cache=cache, **options).predict(), whole)


def test_images_seen_twice_count_once():
    columns = {"index": np.array([3, 1, 3, 2]), "loss": np.array([0.3, 0.1, 0.3, 0.2])}
    assert module._in_order(columns)["loss"].tolist() == [0.1, 0.2, 0.3]


def test_progress(examiner):
    told = []
    examiner(watch=lambda *news: told.append(news)).predict(what="a test")
    assert told == [("a test", done, 60) for done in (0, 16, 32, 48, 60)]


def test_the_batch_does_not_matter(examiner):
    one, other = (examiner(batch=batch).predict(GaussianNoise(10)) for batch in (16, 60))
    assert np.array_equal(one.best, other.best)
    assert np.allclose(one.loss, other.loss, rtol=1e-5)


def test_complaints(examiner, tmp_path):
    class Broken(Linear):
        def forward(self, images):
            return super().forward(images) * float("nan")

    class Narrow(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :3]

    with pytest.raises(UserError, match="logits that are no numbers for test image 0"):
        examiner(Broken()).predict()
    with pytest.raises(UserError, match="tells 3 classes apart, but small has 10"):
        examiner(Narrow()).predict()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made a folder: .*--cache"):
        Cache(tmp_path / "file" / "cache")
    full = Cache(tmp_path / "full")
    key = examiner(cache=full)._key(Unchanged(), 1.0)
    (tmp_path / "full" / f"{key}.npz").mkdir()
    with pytest.raises(UserError, match=r"cannot be written: .*; make room there, or choose a folder with --cache"):
        examiner(cache=full).predict()


def test_any_damage_of_what_is_kept(tmp_path):
    """It is noticed, and taken for nothing rather than for predictions."""
    cache = Cache(tmp_path)
    cache.write("key", {"index": np.arange(3), "loss": np.ones(3)})
    file = tmp_path / "key.npz"
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        found = cache.read("key")
        if found is not None and found.keys() == {"index", "loss"}:
            assert found["index"].tolist() == [0, 1, 2]
            assert found["loss"].tolist() == [1, 1, 1]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("VITREFINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "vitrefine" / "predictions"
    monkeypatch.setenv("VITREFINE_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own" / "predictions"


def test_predictions_are_plain_columns(examiner):
    assert [field.name for field in dataclasses.fields(module.Predictions)] == [
        "index",
        "target",
        "best",
        "confidence",
        "loss",
    ]
