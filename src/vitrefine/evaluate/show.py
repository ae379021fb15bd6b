"""An evaluation as text, for a terminal or a notebook."""

from collections.abc import Iterator

from vitrefine.evaluate.accuracy import Accuracy
from vitrefine.evaluate.evaluation import Evaluation
from vitrefine.evaluate.rfc import Calibration
from vitrefine.evaluate.robustness import Outcome
from vitrefine.evaluate.speed import Speed
from vitrefine.statistics import Estimate

_WIDTH = 30  # of the first column


def show(evaluation: Evaluation) -> str:
    """All that an evaluation found."""
    lines = [f"{evaluation.model} on {evaluation.images:,} images of {evaluation.data}, {evaluation.device}"]
    lines += [f"note: {note}" for note in evaluation.notes]
    if evaluation.accuracy:
        lines += ["", _row("accuracy", "%", "95 % interval"), *_accuracy(evaluation.accuracy)]
    if evaluation.robustness:
        lines += [
            "",
            _row("robustness", "%", "95 % interval", "difference, points"),
            *map(_outcome, evaluation.robustness),
        ]
    if evaluation.rfc:
        lines += ["", *_calibration(evaluation.rfc)]
    if evaluation.speed:
        lines += ["", _row("speed"), *_speed(evaluation.speed)]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, figure: str = "", interval: str = "", more: str = "") -> str:
    return f"{name:<{_WIDTH}}{figure:>8}   {interval:<17}{more}"


def _estimate(name: str, found: Estimate, more: str = "") -> str:
    return _row(name, _number(found.value), interval(found), more)


def interval(found: Estimate, signed: bool = False) -> str:
    """`71.30 … 73.10`; empty without one."""
    if found.low is None or found.high is None:
        return ""
    return f"{_number(found.low, signed)} … {_number(found.high, signed)}"


def _number(value: float, signed: bool = False) -> str:
    return (f"{value:+.2f}" if signed else f"{value:.2f}").replace("-", "−")


def _accuracy(found: Accuracy) -> Iterator[str]:
    yield _estimate("top-1", found.top1)
    if found.top5:
        yield _estimate("top-5", found.top5)
    if found.real:
        yield _estimate("top-1 by ReaL labels", found.real, f"of {found.real.count:,} images that have one")
    yield _row("mean confidence", f"{found.confidence:.2f}")
    yield _row("calibration error (ECE)", f"{found.ece:.2f}")
    yield _row("cross-entropy, nats", f"{found.loss:.3f}")


def _outcome(found: Outcome) -> str:
    ends = interval(found.difference, signed=True)
    lost = _number(found.difference.value, signed=True) + (f" ({ends})" if ends else "")
    draws = f", {found.accuracy.count} draws" if found.accuracy.over == "seeds" else ""
    return _estimate(found.label, found.accuracy, lost + draws)


def _calibration(found: Calibration) -> Iterator[str]:
    yield _row("crop ratio (RFC)", "%", "95 % interval", "on the other half, %")
    for point in found.sweep:
        marks = [mark for ratio, mark in ((found.best, "best"), (found.usual, "usual")) if point.ratio == ratio]
        tested = f"{point.tested_on.value:.2f}"
        yield _estimate(f"{point.ratio:<8g}{', '.join(marks)}", point.chosen_on, tested)
    if found.best == found.usual:
        yield f"the usual ratio, {found.usual:g}, is the best of these: nothing to gain"
    else:
        gain, ends = _number(found.gain.value, signed=True), interval(found.gain, signed=True)
        yield (
            f"{found.best:g} instead of {found.usual:g} gains {gain} points (95 % interval {ends}) "
            f"on {found.gain.count:,} images that had no part in the choice"
        )


def _speed(found: Speed) -> Iterator[str]:
    yield _row(f"images/s, {found.batch} at once", f"{found.images_per_s:,.1f}")
    for name, value in found.latency_ms.items():
        yield _row(f"latency of one, ms, {name}", f"{value:.2f}")
    yield _row("peak memory, MiB", f"{found.memory_mib:,.1f}")
