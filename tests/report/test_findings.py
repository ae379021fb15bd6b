"""What is said of runs."""

import numpy as np

from vitrefine.report import findings
from vitrefine.report.collect import collect
from vitrefine.report.findings import Verdict, headline, rows, verdicts
from vitrefine.report.notes import costs
from vitrefine.report.problems import problems
from vitrefine.report.results import Group

BASE = "vit_tiny_patch16_224"


def right(count: int, of: int = 1000) -> list[bool]:
    return [i < count for i in range(of)]


def only_group(tmp_path) -> Group:
    (group,) = collect([tmp_path]).groups
    return group


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def sentences(group: Group) -> list[str]:
    return [plain(_sentence(verdict)) for verdict in verdicts(group, rows(group))]


def _sentence(verdict: Verdict) -> str:
    if not verdict.figure:
        return f"{verdict.label}: {verdict.finding}."
    return f"{verdict.label}: {verdict.figure} ({verdict.basis}): {verdict.finding}; {verdict.cost}."


def test_no_effect_and_no_cost(make_run, tmp_path) -> None:
    for seed, (base, other) in enumerate([(900, 902), (905, 912), (910, 913)]):
        make_run(BASE, seed, right=right(base), images_per_s=900 + seed)
        make_run(f"{BASE}+cb", seed, right=right(other), images_per_s=898 + 2 * seed)
    group = only_group(tmp_path)
    # Differences 0.2, 0.7 and 0.3: mean 0.4, s = 0.26458, and 4.30265 · s/√3 = 0.65724.
    assert sentences(group) == [
        "+cb: +0.4 points (95 % interval −0.3 … +1.1, 3 seeds): not distinguishable from no effect; costs nothing."
    ]
    assert headline(group, rows(group)) == f"+cb cannot be told apart from {BASE}."
    assert problems(group) == []


def test_better_at_a_cost_and_worse(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed, right=right(900 + seed))
        make_run(
            f"{BASE}+refiner(expansion=2)",
            seed,
            right=right(920 + 2 * seed),
            params=6_048_000,
            macs=450_000_000,
            images_per_s=693,
            memory=600,
        )
        make_run("lit_ti", seed, right=right(850 - seed), macs=180_000_000)
    group = only_group(tmp_path)
    better, worse = sentences(group)
    assert better.startswith("+refiner(expansion=2): +2.1 points (95 % interval +1.9 … +2.3")
    assert better.endswith(": better; at +12 % parameters, +25 % MACs, −23 % images/s and +17 % memory.")
    assert worse.endswith("3 seeds): worse; at −50 % MACs.")
    assert headline(group, rows(group)) == (
        f"+refiner is better than {BASE} by 2.1 points; lit_ti is worse by 5.2 points."
    )


def test_speed_that_varies_more_than_it_differs_is_no_cost(make_run, tmp_path) -> None:
    for seed, (base, other) in enumerate([(900, 700), (690, 850), (880, 710)]):
        make_run(BASE, seed, images_per_s=base)
        make_run(f"{BASE}+cb", seed, images_per_s=other)
    (found,) = verdicts(group := only_group(tmp_path), rows(group))
    assert found.cost == "costs nothing"


def test_speed_of_runs_that_shared_the_device_is_not_told(make_run, tmp_path) -> None:
    for spec, speed in ((BASE, 900), (f"{BASE}+cb", 300)):
        make_run(spec, 0, images_per_s=speed, at_once=3)
    group = only_group(tmp_path)
    (found,) = verdicts(group, rows(group))
    assert found.cost == "costs nothing in parameters, MACs and memory; what it costs in images/s is not known"
    assert costs(group, rows(group)).endswith("of runs that had the device to themselves; some here shared it.")
    make_run(BASE, 1, images_per_s=1000)
    make_run(f"{BASE}+cb", 1, images_per_s=990, at_once=1)
    group = only_group(tmp_path)
    assert [row.images_per_s.value for row in rows(group) if row.images_per_s] == [1000, 990]


def test_costs_that_cannot_be_compared_are_not_said_to_be_nothing(make_run, tmp_path) -> None:
    make_run(BASE, images_per_s=300, at_once=3)
    make_run(f"{BASE}+cb", params=6_048_000)
    (found,) = verdicts(group := only_group(tmp_path), rows(group))
    assert plain(found.cost) == "at +12 % parameters; what it costs in images/s is not known"


def test_other_hardware_has_other_costs(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb", device="NVIDIA H200", images_per_s=9000)
    (found,) = verdicts(group := only_group(tmp_path), rows(group))
    assert found.cost == "costs nothing in parameters and MACs; what it costs in images/s and memory is not known"


def test_one_seed_goes_by_images(make_run, tmp_path) -> None:
    flips = np.array(right(300, 360))
    make_run(BASE, right=flips)
    other = flips.copy()
    other[300:320] = True
    make_run(f"{BASE}+cb", right=other)
    (said,) = sentences(only_group(tmp_path))
    assert said.startswith("+cb: +5.6 points (95 % interval +3.0 … +8.0, ")
    assert "360 test images, 1 seed): better" in said
    group = only_group(tmp_path)
    better = f"+cb is better than {BASE} by 5.6 points"
    assert headline(group, rows(group)) == f"{better}. One seed says so; others may not."
    for seed in (1, 2):
        make_run(BASE, seed, right=right(300 - seed, 360))
        make_run("lit_ti", seed, right=right(200 + 3 * seed, 360))
    group = only_group(tmp_path)
    both = f"{better}; lit_ti is worse by 26.1 points"
    assert headline(group, rows(group)) == f"{both}. Of +cb one seed says so; others may not."


def test_one_spec(make_run, tmp_path) -> None:
    make_run(BASE, right=right(900))
    group = only_group(tmp_path)
    assert plain(headline(group, rows(group))) == (
        f"{BASE} gets 90.0 % of the test images right. There is nothing here to compare it with."
    )
    assert verdicts(group, rows(group)) == []


def test_what_did_not_finish_is_said(make_run, tmp_path) -> None:
    for seed in range(2):
        make_run(BASE, seed, status="finished" if seed == 0 else "failed", error="the loss is NaN at step 7.")
        make_run(f"{BASE}+cb", seed)
        make_run(f"{BASE}+cb_s", seed, status="stopped")
    group = only_group(tmp_path)
    assert problems(group) == [
        f"{BASE}, seed 1: failed: the loss is NaN at step 7.",
        "+cb_s, seed 0: was stopped, after 10 epochs.",
        "+cb_s, seed 1: was stopped, after 10 epochs.",
        "+cb: what seed 1 gave is not in its difference, for the baseline has no such run.",
    ]
    assert sentences(group)[1] == "+cb_s: no run has finished, so nothing can be said."
    assert headline(group, rows(group)).endswith("; nothing can be said of +cb_s.")


def test_images_that_could_not_be_read(make_run, tmp_path) -> None:
    for seed in range(2):
        make_run(BASE, seed, images=360)
        make_run(f"{BASE}+cb", seed, images=359)
    said = f"+cb: it was tested on other images than {BASE}, for some could not be read."
    assert sentences(only_group(tmp_path)) == [said]


def test_no_run_of_the_baseline(make_run, tmp_path) -> None:
    make_run(BASE, status="failed", error="no")
    make_run(f"{BASE}+cb", started="2026-04-01")
    group = only_group(tmp_path)
    assert sentences(group) == [f"+cb: no run of {BASE} has finished, so there is nothing to compare with."]
    assert headline(group, rows(group)) == "Nothing can be said of +cb."


def test_the_same_in_every_seed(make_run, tmp_path) -> None:
    for seed in range(3):
        make_run(BASE, seed, right=right(900))
        make_run(f"{BASE}+cb", seed, right=right(910))
    (said,) = sentences(only_group(tmp_path))
    assert said.startswith("+cb: +1.0 points (3 seeds): the same in every seed")


def test_names_that_differ_in_arguments_only_keep_them(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb(layers=all)")
    make_run(f"{BASE}+cb(layers=upper)")
    names = findings.short_names(only_group(tmp_path))
    assert names["+cb(layers=all)"] == "+cb(layers=all)"


def test_brackets_in_quotes_are_part_of_a_name(make_run, tmp_path) -> None:
    model = r'hf:"./vits (\"old\")/tiny"'
    make_run(model)
    make_run(f'{model}+cb(layers=all)+se(name="a)")')
    assert list(findings.short_names(only_group(tmp_path)).values()) == [model, "+cb+se"]


def test_different_hardware_is_said(make_run, tmp_path) -> None:
    make_run(BASE)
    make_run(f"{BASE}+cb", device="NVIDIA H200")
    assert problems(only_group(tmp_path)) == [
        "The runs used different hardware (CPU, 2 threads and NVIDIA H200): images/s and memory do not compare."
    ]
