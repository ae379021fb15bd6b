"""The papers' figures beside ours: every difference is known, and explained."""

import pytest
import timm

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.cli.models import _beside_ours
from vitrefine.models.published import PUBLISHED, Published, at_precision

# Where no model of ours can have the printed figure; the rows say why.
DIFFERS = {
    ("refined_vit_s", 224): "macs",
    ("refined_vit_s", 384): "macs",
    ("refined_vit_m", 224): "macs",
    ("refined_vit_m", 384): "macs",
    ("refined_vit_l", 384): "macs",
    ("refined_vit_l", 448): "macs",
    ("refined_vit_base", 224): "params",
    ("cb_vit_s", 224): "params",
    ("cb_s_vit_s", 224): "params",
    ("pvt_small", 224): "params",
    ("pvt_small_msa(attention=[0,1,1,1])", 224): "macs",
}


@pytest.mark.parametrize(
    ("count", "like", "rounding", "expected"),
    [
        (19_366_000, "20M", "round", "19M"),
        (48_600_000, "48M", "truncate", "48M"),
        (48_600_000, "48M", "round", "49M"),
        (22_050_664, "22.0M", "round", "22.1M"),
        (22_099_999, "22.0M", "truncate", "22.0M"),
        (3_614_000_000, "3.6G", "round", "3.6G"),
        (101_963_000_000, "98.0B", "round", "102.0B"),
    ],
)
def test_at_precision(count: int, like: str, rounding: str, expected: str) -> None:
    assert at_precision(count, like, rounding) == expected


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model}-{row.size}")
def test_published_figures(row: Published) -> None:
    if not timm.is_model(row.model.partition("(")[0]):
        pytest.skip(f"{row.model} is not registered")
    ours = _beside_ours(row)
    differs = DIFFERS.get((row.model, row.size))
    assert ours["params_agree"] == (differs != "params")
    assert ours["macs_agree"] == (differs != "macs")
    assert row.note or differs is None


def test_every_known_difference_has_its_row() -> None:
    assert {(row.model, row.size) for row in PUBLISHED} >= DIFFERS.keys()
