"""What a group of runs says: a row of figures for each spec, and the answer in plain words."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitrefine.report import words
from vitrefine.report.results import Arm, Group, Run, shortened
from vitrefine.statistics import Estimate, accuracy, difference

# What is measured rather than counted varies from run to run; changes below this share are not spoken of.
_NOISE = 0.02
_NAMED = 4  # how many specs a headline names before it counts the rest


@dataclass(frozen=True)
class Figure:
    """What something costs, in itself and as a multiple of what the baseline costs."""

    value: float
    ratio: float | None = None
    certain: bool = True  # counted, or at least outside what varies from seed to seed

    @property
    def differs(self) -> bool:
        return self.ratio is not None and self.certain and abs(self.ratio - 1) >= 0.0005


@dataclass(frozen=True)
class Row:
    """A spec's figures; what no finished run tells is None."""

    arm: Arm
    decimals: int
    accuracy: Estimate | None
    difference: Estimate | None
    params: Figure | None
    macs: Figure | None
    images_per_s: Figure | None
    memory: Figure | None

    @property
    def label(self) -> str:
        return self.arm.label


def rows(group: Group) -> list[Row]:
    """One row a spec, the baseline's first."""
    base = group.baseline
    # Of a test set, every finished run of a group saw the same images.
    digits = words.decimals(max((len(bits) for arm in group.arms for bits in arm.right.values()), default=0))

    alike = len({run.device for arm in group.arms for run in arm.finished.values()}) == 1  # the hardware

    def row(arm: Arm) -> Row:
        other = None if arm is base else base

        def counted(read: Callable[[Run], float | None]) -> Figure | None:
            return _figure(_values(arm.runs, read)[:1], _values(other.runs, read)[:1] if other else [])

        def measured(read: Callable[[Run], float | None]) -> Figure | None:
            own, others = (_values(owner.finished.values(), read) if owner else [] for owner in (arm, other))
            return _figure(own, others if alike else [], noise=_NOISE)

        return Row(
            arm,
            digits,
            accuracy(arm.right),
            difference(other.right, arm.right) if other else None,
            counted(lambda run: run.params),
            counted(lambda run: run.macs),
            measured(lambda run: run.result.images_per_s if run.result and run.alone else None),
            measured(lambda run: run.result.peak_memory_mib if run.result else None),
        )

    return [row(arm) for arm in group.arms]


def _values(runs: Iterable[Run], read: Callable[[Run], float | None]) -> list[float]:
    return [value for value in map(read, runs) if value]


def _figure(own: list[float], others: list[float], noise: float = 0.0) -> Figure | None:
    if not own:
        return None
    value = statistics.median(own)
    if not others:
        return Figure(value)
    ratio = value / statistics.median(others)
    apart = min(own) > max(others) or max(own) < min(others)
    return Figure(value, ratio, apart and abs(ratio - 1) >= noise)


def short_names(group: Group) -> dict[str, str]:
    """What headlines call the specs, by their labels."""
    return shortened([arm.label for arm in group.arms])


def baseline_name(group: Group) -> str:
    """What sentences call the spec that others are compared with."""
    return short_names(group)[group.baseline.label]


def headline(group: Group, table: list[Row]) -> str:
    """The answer in one sentence or two."""
    names = short_names(group)
    base = names[table[0].label]
    if len(table) == 1:
        found = table[0].accuracy
        if found is None:
            return f"No run of {base} has finished."
        reached = (
            f"{base} gets {words.number(found.value, table[0].decimals)}{words.PER_CENT} of the test images right."
        )
        return f"{reached} There is nothing here to compare it with."
    told: dict[int | None, list[Row]] = {1: [], -1: [], 0: [], None: []}
    for row in table[1:]:
        told[row.difference.sign if row.difference else None].append(row)
    parts: list[str] = []
    for sign, word in ((1, "better"), (-1, "worse")):
        if rows := told[sign]:
            than = f" than {base}" if not parts else ""
            parts.append(f"{_listed(rows, names)} {'is' if len(rows) == 1 else 'are'} {word}{than}{_by(rows)}")
    if told[0]:
        parts.append(f"{_listed(told[0], names)} cannot be told apart from {base}")
    if told[None]:
        parts.append(f"nothing can be said of {_listed(told[None], names)}")
    text = "; ".join(parts)
    text = text if text.startswith(tuple(names.values())) else words.first_upper(text)
    return f"{text}.{_of_one_seed(table, names)}"


def _of_one_seed(table: list[Row], names: dict[str, str]) -> str:
    """A warning where better or worse rests on one seed: that is a verdict on two models, but not on their specs."""
    found = [(row, row.difference) for row in table if row.difference]
    single = [row for row, difference in found if difference.over == "images" and difference.sign]
    if not single:
        return ""
    alone = all(difference.over == "images" for _, difference in found)
    return f" {'One' if alone else f'Of {_listed(single, names)} one'} seed says so; others may not."


def _by(found: list[Row]) -> str:
    """How much: of several, the least and the most."""
    amounts = sorted(
        (abs(row.difference.value), words.enough(row.difference, row.decimals)) for row in found if row.difference
    )
    texts = list(dict.fromkeys(words.number(*amounts[place]) for place in (0, -1)))
    return f" by {' to '.join(texts)} points"


def _listed(found: list[Row], names: dict[str, str]) -> str:
    shown = [names[row.label] for row in found]
    if len(shown) > _NAMED:
        shown = [*shown[: _NAMED - 1], f"{len(shown) - _NAMED + 1} others"]
    return words.listing(shown)


@dataclass(frozen=True)
class Verdict:
    """One spec against the baseline."""

    label: str
    sign: int | None
    figure: str  # "+0.4 points"
    basis: str  # "95 % interval −0.1 … +0.9 over 3 seeds"
    finding: str  # "not distinguishable from no effect"
    cost: str


def verdicts(group: Group, table: list[Row]) -> list[Verdict]:
    """The answer spec by spec."""
    return [_verdict(row, table[0], baseline_name(group)) for row in table[1:]]


def _verdict(row: Row, base: Row, base_name: str) -> Verdict:
    found = row.difference
    if found is None:
        if row.accuracy is None:
            why = "no run has finished, so nothing can be said"
        elif base.accuracy is None:
            why = f"no run of {base_name} has finished, so there is nothing to compare with"
        elif row.arm.right.keys() & base.arm.right.keys():
            why = f"it was tested on other images than {base_name}, for some could not be read"
        else:
            why = f"it shares no finished seed with {base_name}, so no difference can be taken"
        return Verdict(row.label, None, "", "", why, "")
    digits = words.enough(found, row.decimals)
    figure = f"{words.number(found.value, digits, signed=True)} points"
    if found.sign is None:
        basis, finding = words.plural(found.count, "seed"), "the same in every seed, which leaves no interval to take"
    else:
        over = words.plural(found.count, "seed") if found.over == "seeds" else f"{found.count:,} test images, 1 seed"
        basis = f"95{words.PER_CENT} interval {words.interval(found, digits, signed=True)}, {over}"
        finding = {1: "better", -1: "worse", 0: "not distinguishable from no effect"}[found.sign]
    return Verdict(row.label, found.sign, figure, basis, finding, cost(row))


def cost(row: Row) -> str:
    """`costs nothing`, or what changed: `at +12 % parameters and −23 % images/s`; and what of it is not known."""
    figures = (
        ("parameters", row.params),
        ("MACs", row.macs),
        ("images/s", row.images_per_s),
        ("memory", row.memory),
    )
    known = {name: (figure, figure.ratio) for name, figure in figures if figure and figure.ratio is not None}
    unknown = [name for name, _ in figures if name not in known]
    changes = [f"{words.percent(ratio)} {name}" for name, (figure, ratio) in known.items() if figure.differs]
    told = f"at {words.listing(changes)}" if changes else "costs nothing"
    if not unknown:
        return told
    where = "" if changes else f" in {words.listing(list(known))}"
    return f"{told}{where}; what it costs in {words.listing(unknown)} is not known"
