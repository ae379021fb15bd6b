"""Which images are tested, and that their pixels are the bytes of the set."""

import pytest
import torch

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
