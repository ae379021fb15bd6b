"""The sentences of the page that say how to read what is shown."""

import math
from collections.abc import Sequence

from vitrefine.report import words
from vitrefine.report.attention import Look
from vitrefine.report.findings import Row, baseline_name
from vitrefine.report.results import Group
from vitrefine.statistics import Estimate, half_width

_MORE_SEEDS = (10, 30)


def summary(group: Group) -> str:
    """On one line what was trained, and how."""
    epochs = max((run.result.epochs for run in group.runs if run.result), default=0)
    parts = [
        group.first.data,
        f"recipe {group.first.recipe_name}",
        *([words.plural(epochs, "epoch")] if epochs else []),
        *([f"started from {group.first.weights}"] if group.first.weights else []),
    ]
    return " · ".join([*parts, words.plural(len(group.seeds), "seed")])


def problems_title(group: Group) -> str:
    """How much of what was planned is there."""
    done = sum(len(arm.finished) for arm in group.arms)
    missing = sum(len(arm.unfinished) for arm in group.arms)
    if not missing:
        return "Worth knowing"
    if not done:
        return "No run has finished."
    verb = "has" if missing == 1 else "have"
    return f"{missing} of {done + missing} runs {verb} not finished; the figures are from the other {done}."


def _seeds(group: Group) -> list[int]:
    """How many seeds specs have finished, from the fewest to the most; those that have none are left out."""
    return sorted(len(arm.finished) for arm in group.arms if arm.finished)


def intervals(group: Group, table: Sequence[Row]) -> str:
    """What accuracies and intervals are over."""
    images = max((len(bits) for arm in group.arms for bits in arm.right.values()), default=0)
    seeds = _seeds(group)
    if not seeds:
        return "No run has finished yet, so there are no accuracies."
    share = f"Accuracy is the share of {images:,} test images whose class comes first"
    if seeds[-1] > 1:
        many = f"{seeds[-1]}" if seeds[0] == seeds[-1] else f"{seeds[0]} to {seeds[-1]}"
        single = " Where there is one seed, or one in common with the baseline, intervals are over test images."
        mixed = any(each.over == "images" for row in table for each in (row.accuracy, row.difference) if each)
        return f"{share}, as a mean over {many} seeds; differences are taken seed by seed.{single if mixed else ''}"
    return (
        f"{share}. There is one seed, so the intervals say how far other test images could move a figure, not how far "
        "another seed could; that takes three seeds or more."
    )


def costs(group: Group, table: Sequence[Row]) -> str:
    """Where the figures of cost come from."""
    against = f"Small figures under the costs are relative to {baseline_name(group)}. " if len(table) > 1 else ""
    median = ", the median over seeds" if max(_seeds(group), default=0) > 1 else ""
    memory = "" if any(row.memory for row in table) else " Memory was not measured."
    shared = any(not run.alone for arm in group.arms for run in arm.runs)
    speed = " Images/s are of runs that had the device to themselves; some here shared it." if shared else ""
    macs = "MACs are multiply-accumulates, which papers print as FLOPs."
    return f"{against}Images/s and memory are measured while training{median}; {macs}{memory}{speed}"


def differences(table: Sequence[Row]) -> str:
    """How to read the chart of differences."""
    found = [row.difference for row in table if row.difference]
    told = f"Dot: mean difference, filled where the 95{words.PER_CENT} interval (bar) excludes zero"
    told += "; ticks below: single seeds." if any(each.over == "seeds" for each in found) else "."
    return f"{told} {many(table)}".rstrip() + _more_seeds(found, table[0].decimals)


def many(table: Sequence[Row]) -> str:
    """What to keep in mind where there are several comparisons."""
    found = sum(row.difference is not None for row in table)
    if found < 2:
        return ""
    # Bonferroni's bound, which holds whatever the comparisons have in common.
    return (
        f"Each interval stands for itself: among {found} comparisons without any effect, the chance that at least one "
        f"excludes zero is up to {min(100, 5 * found)}{words.PER_CENT}."
    )


def _more_seeds(found: Sequence[Estimate], digits: int) -> str:
    """What more seeds would tell, where these leave it open."""
    seeded = [(each.count - 1, each.spread) for each in found if each.spread is not None]
    counts = [count for count in _MORE_SEEDS if all(freedom < count - 1 for freedom, _ in seeded)]
    if not seeded or not counts or all(each.sign for each in found):
        return ""
    spread = math.sqrt(sum(freedom * each**2 for freedom, each in seeded) / sum(freedom for freedom, _ in seeded))
    widths = [f"±{words.number(half_width(spread, count), digits)} with {count}" for count in counts]
    return (
        f" From seed to seed a difference varies by {words.number(spread, digits)} points (standard deviation): "
        f"intervals would be about {words.listing(widths)} seeds."
    )


def curves(group: Group) -> str:
    """How to read the curves."""
    several = max(len({run.seed for run in arm.runs if run.epochs}) for arm in group.arms) > 1
    lines = "Thick lines are means over seeds, thin lines single seeds." if several else "One line a spec, of one seed."
    return f"{lines} The first epochs may run out of the frame, to show the last ones better."


def entropy(seen: Look) -> str:
    """How to read the entropies."""
    return (
        "Marks are means over the heads of a layer, bars reach from the narrowest head to the widest; over "
        f"{seen.sample} test images, models of seed {seen.seed}. At 100{words.PER_CENT} a query attends to all tokens "
        f"alike, at 0{words.PER_CENT} to one only."
    )


def pictures(seen: Look) -> str:
    """How to read the attention maps."""
    return (
        "The more orange, the more attention of the class token, or of the average patch where there is no class "
        "token; each map is scaled to its own greatest value. Below a map stands what the model takes the image for. "
        "The images are not picked by hand: they are the first of different classes in the test set, and the next ones "
        f"where classes are few. Models of seed {seen.seed}."
    )


_OVER_SEEDS = (
    "Intervals over seeds: mean ± t · s/√n with n − 1 degrees of freedom (Student's t); for a difference, over the "
    "differences within each seed, whose models were trained on the same images in the same order. They say what "
    "training again with other seeds would give on the same test images, not what other test images would."
)
_OVER_IMAGES = (
    "Intervals over images, where there is one seed: Wilson's for an accuracy; for a difference Bonett and Price's "
    "(2012) for paired shares, from the images that one model gets right and the other wrong. They say what other test "
    "images would give, not what another seed would."
)


def reading(group: Group, table: Sequence[Row]) -> list[str]:
    """How the intervals were made, and what they do not say; a paragraph each."""
    kinds = {each.over for row in table for each in (row.accuracy, row.difference) if each}
    return [
        *([_OVER_SEEDS] if "seeds" in kinds else []),
        *([_OVER_IMAGES] if "images" in kinds else []),
        f"“Better” and “worse” are said where the whole 95{words.PER_CENT} interval lies on one side of zero. One that "
        "includes zero does not show that there is no effect, but that effects as large as its ends are not ruled out.",
        "Of speed and memory a change is spoken of where all runs lie on one side of all runs of "
        f"{baseline_name(group)}, and the medians differ by at least 2{words.PER_CENT}.",
    ]
