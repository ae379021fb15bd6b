"""The verdict on hand-made differences and results."""

from pathlib import Path
from typing import Any

import pytest

from vitrefine.claims.raw import Raw, RawRun
from vitrefine.claims.schema import Claim, Ledger, Test
from vitrefine.claims.verdict import assess, assess_all, decide
from vitrefine.errors import UserError
from vitrefine.statistics import Estimate, difference_over_seeds

FIRST, SECOND = "vit_tiny_patch16_224", "vit_tiny_patch16_224+cb"


def a_test(**more: Any) -> Test:
    usual = {"first": FIRST, "second": SECOND, "expect": "higher", "data": "cifar100", "recipe": "cifar", "seeds": 3}
    return Test.model_validate(usual | more)


def between(low: float, high: float, seeds: int = 3) -> Estimate:
    return Estimate((low + high) / 2, low, high, "seeds", seeds)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.9, "reproduced"), (-0.1, 0.9, "inconclusive"), (-0.9, -0.1, "not reproduced"), (0.0, 0.9, "inconclusive")],
)
def test_a_direction(low: float, high: float, verdict: str) -> None:
    assert decide(a_test(), between(low, high))[0] == verdict
    assert decide(a_test(expect="lower"), between(-high, -low))[0] == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.9, "reproduced"),  # of the claimed sign, and 0.7 is possible
        (0.8, 0.9, "reproduced"),  # larger than claimed
        (0.1, 0.6, "not reproduced"),  # of the claimed sign, but 0.7 is ruled out
        (-0.1, 0.6, "not reproduced"),
        (-0.1, 0.7, "inconclusive"),
        (-0.9, -0.1, "not reproduced"),
    ],
)
def test_a_direction_and_a_size(low: float, high: float, verdict: str) -> None:
    assert decide(a_test(by=0.7), between(low, high))[0] == verdict
    assert decide(a_test(by=0.7, expect="lower"), between(-high, -low))[0] == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.4, 0.3, "reproduced"),
        (0.1, 0.3, "reproduced"),
        (-0.6, 0.3, "inconclusive"),
        (-0.5, 0.3, "inconclusive"),
        (-0.9, -0.6, "not reproduced"),
        (-0.4, -0.1, "reproduced"),  # surely lower, but by less than counts
    ],
)
def test_no_loss(low: float, high: float, verdict: str) -> None:
    assert decide(a_test(by=0.5, expect="not_lower"), between(low, high))[0] == verdict


def test_without_an_interval_nothing_is_concluded() -> None:
    assert decide(a_test(), between(0.1, 0.9, seeds=2)) == ("inconclusive", "2 seeds so far, of 3")
    verdict, reason = decide(a_test(), Estimate(0.5, None, None, "seeds", 3))
    assert (verdict, reason.split(",")[0]) == ("inconclusive", "the same in every seed")


def results(spec: str, values: dict[int, float], metric: str = "accuracy", **more: Any) -> Raw:
    hardware = more.pop("hardware", "GPU")
    runs = [
        RawRun(seed=seed, status="finished", started=f"{seed}", metrics={metric: value}, hardware=hardware)
        for seed, value in values.items()
    ]
    known = {"data": "cifar100", "fingerprint": "f00d", "recipe": "cifar", "settings": {"epochs": "20"}, "runs": runs}
    return Raw(**{"spec": spec, "base_spec": spec, "commands": ["vitrefine train"], **known, **more})


def a_claim(**more: Any) -> Claim:
    return Claim(where="Table 1: row", claim="It helps.", test=a_test(**more))


def verdict_on(claim: Claim, *raws: Raw) -> tuple[str, str]:
    found = assess(claim, {Path(f"{number}.json"): raw for number, raw in enumerate(raws)})
    return found.verdict, found.reason


def test_the_difference_is_paired_by_seed() -> None:
    first, second = {0: 70.0, 1: 75.0, 2: 72.0, 3: 1.0}, {2: 72.9, 1: 76.0, 0: 71.1, 9: 99.0}
    found = assess(a_claim(), {Path("a"): results(FIRST, first), Path("b"): results(SECOND, second)})
    assert found.difference == difference_over_seeds(first, second)
    assert found.difference is not None
    assert found.difference.count == 3
    assert found.verdict == "reproduced"
    assert found.files == {FIRST: Path("a"), SECOND: Path("b")}
    assert found.figures is not None
    assert found.figures[FIRST].value == pytest.approx(217 / 3)  # of the seeds that both have


def test_a_gain_larger_than_another() -> None:
    few, many = f"{FIRST}(num_heads=1)", f"{FIRST}(num_heads=6)"
    claim = a_claim(first=few, second=f"{few}+cb", less={"first": many, "second": f"{many}+cb"})
    raws = [
        results(few, {0: 60.0, 1: 61.0, 2: 62.0}),
        results(f"{few}+cb", {0: 63.0, 1: 64.1, 2: 64.9}),
        results(many, {0: 70.0, 1: 71.0, 2: 72.0}),
        results(f"{many}+cb", {0: 71.0, 1: 72.0, 2: 73.0}),
    ]
    found = assess(claim, {Path(str(number)): raw for number, raw in enumerate(raws)})
    assert found.difference is not None
    assert found.difference.value == pytest.approx(2.0)
    assert found.verdict == "reproduced"
    assert verdict_on(claim, *raws[:3]) == ("not run", f"no results of `{many}+cb` yet")


def test_a_metric_that_is_a_difference_itself() -> None:
    claim = a_claim(first=None, second=f"{FIRST}+cb_s", metric="broadcast_mean_rise")
    raw = results(f"{FIRST}+cb_s", {0: 0.2, 1: 0.3, 2: 0.25}, "broadcast_mean_rise")
    assert verdict_on(claim, raw) == ("reproduced", "higher, as claimed")


def test_results_that_do_not_belong_beside_each_other() -> None:
    values = {0: 70.0, 1: 75.0, 2: 72.0}
    other = ("not run", "there are results, but of other images or settings for each spec")
    assert verdict_on(a_claim(), results(FIRST, values), results(SECOND, values, fingerprint="beef")) == other
    assert verdict_on(a_claim(), results(FIRST, values), results(SECOND, values, settings={"epochs": "9"})) == other
    for wrong in ({"data": "digits"}, {"recipe": "deit"}, {"weights": "pretrained"}):
        raws = results(FIRST, values), results(SECOND, values, **wrong)
        assert verdict_on(a_claim(), *raws) == ("not run", "no results of `+cb` yet")


def test_two_comparisons_to_choose_from() -> None:
    values, settings = {0: 70.0, 1: 75.0, 2: 72.0}, {"epochs": "9"}
    raws = [results(spec, values, settings=s) for spec in (FIRST, SECOND) for s in ({"epochs": "20"}, settings)]
    with pytest.raises(UserError, match=r"both have results of .*; say under settings which epochs is meant"):
        verdict_on(a_claim(), *raws)
    assert verdict_on(a_claim(settings={"epochs": 9}), *raws)[0] == "inconclusive"


def test_no_file_hides_another() -> None:
    values = {0: 70.0, 1: 75.0, 2: 72.0}
    with pytest.raises(UserError, match=r"both have results of .*\+cb with recipe cifar; move one of them away"):
        verdict_on(a_claim(), results(FIRST, values), results(SECOND, values), results(SECOND, values))


def test_speed_is_compared_on_one_machine_only() -> None:
    claim = a_claim(metric="images_per_s", seeds=2)
    first, second = {0: 900.0, 1: 910.0}, {0: 990.0, 1: 1005.0}
    same = results(FIRST, first, "images_per_s"), results(SECOND, second, "images_per_s")
    assert verdict_on(claim, *same)[0] == "reproduced"
    assert verdict_on(claim, same[0], results(SECOND, second, "images_per_s", hardware="CPU"))[0] == "inconclusive"


def test_failures_are_told() -> None:
    failed = [RawRun(seed=0, status="failed", error="loss is NaN", started="0", hardware="GPU")]
    found = verdict_on(a_claim(), results(FIRST, {0: 70.0}), results(SECOND, {}, runs=failed))
    assert found == ("inconclusive", f"no run of `{SECOND}` came to an end")


def test_no_common_seed() -> None:
    found = verdict_on(a_claim(), results(FIRST, {0: 70.0}), results(SECOND, {1: 70.0}))
    assert found == ("inconclusive", "there is no seed that all specs have")


def test_a_metric_that_was_not_measured() -> None:
    values = {0: 70.0, 1: 75.0}
    found = verdict_on(a_claim(metric="entropy"), results(FIRST, values, "entropy"), results(SECOND, values))
    assert found == ("not run", f"entropy of attention, mean of layers was not measured for `{SECOND}`")


def test_a_repetition_has_the_verdict_of_what_it_repeats() -> None:
    again = Claim(where="Table 2: row", claim="It helps.", same_as="one")
    raws = {Path("a"): results(FIRST, {0: 1.0, 1: 2.0, 2: 3.0}), Path("b"): results(SECOND, {0: 5.0, 1: 6.1, 2: 7.2})}
    found = assess_all(Ledger("x", "X", "x", {"two": again, "one": a_claim()}), raws)
    assert found["two"] == found["one"]
    assert found["two"].verdict == "reproduced"
