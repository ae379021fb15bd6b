"""Figures as a reader wants them: rounded to what they are worth, with their units and true minus signs."""

from vitrefine.statistics import Estimate

PER_CENT = "\u00a0%"  # no line ends before the sign
_FINE = 5000  # test images, of which one is no more than two hundredths of a point


def decimals(test_images: int) -> int:
    """How many decimals of a per cent a test set of this size can tell apart."""
    return 2 if test_images >= _FINE else 1


def first_upper(text: str) -> str:
    """A text that begins a sentence."""
    return text[:1].upper() + text[1:]


def number(value: float, digits: int, signed: bool = False) -> str:
    """`−0.42`, `1,234.5`; a value that rounds to zero has no sign."""
    text = f"{value:+,.{digits}f}" if signed else f"{value:,.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def interval(estimate: Estimate, digits: int, signed: bool = False) -> str:
    """`−0.1 … +0.9`; empty without an interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{number(estimate.low, digits, signed)} … {number(estimate.high, digits, signed)}"


def half_width(estimate: Estimate, digits: int) -> str:
    """`±0.5` where the interval is symmetric, else its two ends."""
    if estimate.low is None or estimate.high is None:
        return ""
    if estimate.over == "seeds":
        return f"±{number(estimate.high - estimate.value, digits)}"
    return interval(estimate, digits)


def enough(estimate: Estimate, digits: int) -> int:
    """As many decimals as it takes for an interval that excludes zero not to read as if it touched it."""
    if estimate.low is None or estimate.high is None or not estimate.sign:
        return digits
    nearest = min(abs(estimate.low), abs(estimate.high))
    while digits < 4 and round(nearest, digits) == 0:
        digits += 1
    return digits


def count(value: float) -> str:
    """Three digits or so and a unit: 22.1 M."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{_three(value / unit)} {name}"
    return _three(value)


def _three(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate_digits(value: float) -> int:
    """Decimals of images a second."""
    return 0 if value >= 10 else 1


def rate(value: float) -> str:
    """Images a second."""
    return number(value, rate_digits(value))


def mebibytes(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 10 * 1024 else f"{value:,.0f} MiB"


def duration(seconds: float) -> str:
    """`1 h 20 min`, `4 min 5 s`, `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(ratio: float) -> str:
    """A ratio as a change: 1.123 is `+12 %`, and less than a twentieth of a per cent is `±0 %`."""
    change = 100 * (ratio - 1)
    if abs(change) < 0.05:
        return f"±0{PER_CENT}"
    return f"{number(change, 1 if abs(change) < 9.95 else 0, signed=True)}{PER_CENT}"


def listing(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def specs(names: list[str]) -> str:
    """Who they are, or of many how many: `4 specs`."""
    return listing(names) if len(names) <= 3 else f"{len(names)} specs"


def plural(many: int, thing: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{many} {thing}{'' if many == 1 else 's'}"
