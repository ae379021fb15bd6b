"""Summaries of values: of those that are numbers, row by row and of all together."""

import math

import pytest
import torch

from vitrefine.diagnose import profile
from vitrefine.diagnose.profile import Layer, Summary


def test_by_hand() -> None:
    assert Summary.of(torch.arange(101.0)) == Summary(50, 15, 50, 85)


def test_what_is_no_number_does_not_count() -> None:
    values = torch.tensor([[0.0, 1.0, math.nan], [math.nan, math.nan, 8.0]])
    layer = Layer.of("block", values)
    assert layer.heads[0].mean == 0.5
    assert layer.heads[1] == Summary(8, 8, 8, 8)
    assert layer.whole.mean == 3
    assert all(math.isnan(value) for value in vars(Summary.of(values[:, :0])).values())
    assert all(math.isnan(value) for value in vars(Summary.of(torch.full((3,), math.nan))).values())


def test_percentiles_of_very_many_values_are_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MOST_VALUES", 11)
    assert Summary.of(torch.arange(101.0)) == Summary(50, 15, 50, 85)  # of every tenth
