"""Options that make no sense are refused with their name."""

import pytest
from pydantic import ValidationError

from vitrefine.data.options import NOTHING, Augment, DataOptions


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (DataOptions, {"validation": 1.0}),
        (DataOptions, {"validation": -0.1}),
        (DataOptions, {"size": 0}),
        (DataOptions, {"workers": -1}),
        (DataOptions, {"max_broken": 2}),
        (DataOptions, {"crop_ratio": 0}),
        (DataOptions, {"crop_ratio": 1e-4}),
        (DataOptions, {"batch": 3}),
        (Augment, {"crop": "random"}),
        (Augment, {"scale": (0.5, 0.2)}),
        (Augment, {"rand_augment": 11}),
        (Augment, {"mixup": 1.5}),
        (Augment, {"smoothing": 1.0}),
        (Augment, {"repeats": 0}),
    ],
)
def test_bad_values_are_named(options, wrong):
    with pytest.raises(ValidationError) as caught:
        options(**wrong)
    (problem,) = caught.value.errors()
    assert problem["loc"][0] == next(iter(wrong))


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        NOTHING.flip = 0.5
