"""What claims are about: figures of a run, read from what training, evaluation and diagnosis left in its folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vitrefine.errors import UserError
from vitrefine.evaluate.evaluation import FILE
from vitrefine.train.run import RunInfo

DIAGNOSIS = "diagnosis.json"  # where `vitrefine diagnose RUN --out RUN/diagnosis.html` puts its numbers


@dataclass(frozen=True)
class Metric:
    """How a figure is spoken of."""

    words: str
    unit: str
    difference: str  # the unit of differences
    decimals: int
    of_machine: bool = False  # whether it says as much of the machine as of the model


def _accuracy(words: str) -> Metric:
    return Metric(words, "%", "points", 2)


METRICS: Mapping[str, Metric] = {
    "accuracy": _accuracy("top-1 accuracy"),
    "top5": _accuracy("top-5 accuracy"),
    "test_loss": Metric("test loss", "", "", 3),
    "train_loss": Metric("training loss at the end", "", "", 3),
    "images_per_s": Metric("training speed", "images/s", "images/s", 0, of_machine=True),
    "peak_memory_mib": Metric("peak memory in training", "MiB", "MiB", 0, of_machine=True),
    "entropy": Metric("entropy of attention, mean of layers", "nats", "nats", 3),
    "class_entropy": Metric("entropy of the class token's attention, mean of layers", "nats", "nats", 3),
    "distance": Metric("relative distance of attention, mean of layers", "", "", 4),
    "map_similarity": Metric("cosine of two heads' maps, as they meet the values", "", "", 3),
    "token_similarity": Metric("cosine of two tokens, mean of layers", "", "", 3),
    "evolution": Metric("feature evolution, mean of blocks", "", "", 3),
    "broadcast_mean_rise": Metric("mean scale of CB_S, upper half less lower half", "", "", 4),
    "broadcast_ratio_rise": Metric("evenness of CB_S's scales, upper half less lower half", "", "", 4),
    "occlusion": _accuracy("accuracy with the centre black"),
    "fgsm-1": _accuracy("accuracy under FGSM, ε = 1/255"),
    "shot-noise": _accuracy("accuracy under shot noise"),
    "noise-5": _accuracy("accuracy under Gaussian noise, σ = 5"),
    "noise-10": _accuracy("accuracy under Gaussian noise, σ = 10"),
    "blur-1": _accuracy("accuracy under blur, σ = 1"),
    "blur-2": _accuracy("accuracy under blur, σ = 2"),
}


@dataclass(frozen=True)
class Measured:
    """Figures by metric, and which other commands than training they took, as their words after `vitrefine`."""

    values: dict[str, float]
    commands: tuple[tuple[str, ...], ...]


def measure(run: RunInfo) -> Measured:
    """All that a run's folder tells of it."""
    values: dict[str, float] = dict(_trained(run))
    commands: list[tuple[str, ...]] = []
    if run.result:
        with _reading(run.folder / FILE, "evaluation", "evaluate"):
            found = dict(_robustness(run))
        if found:
            values |= found
            commands.append(("evaluate", "RUN", "--suite", "robustness"))
        with _reading(run.folder / DIAGNOSIS, "diagnosis", "diagnose"):
            diagnosis = _diagnosis(run)
            values |= dict(_attention(diagnosis.get("profiles", {}))) if diagnosis else {}
        if diagnosis:
            images = str(diagnosis.get("images"))
            commands.append(("diagnose", "RUN", "--data", "DATA", "--images", images, "--out", "RUN/diagnosis.html"))
    return Measured(values, tuple(commands))


@contextmanager
def _reading(path: Path, what: str, command: str) -> Iterator[None]:
    """Say of a file that holds something else than is looked for that it does."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no {what}; delete it, or run vitrefine {command} again") from error


def _trained(run: RunInfo) -> Iterator[tuple[str, float]]:
    result = run.result
    if result is None:
        return
    yield "accuracy", result.top1
    yield "top5", result.top5
    yield "test_loss", result.test_loss
    if run.alone:
        yield "images_per_s", result.images_per_s
    if result.peak_memory_mib is not None:
        yield "peak_memory_mib", result.peak_memory_mib
    for epoch in run.epochs:
        if epoch.epoch == result.epochs and epoch.train_loss is not None:
            yield "train_loss", epoch.train_loss


def _robustness(run: RunInfo) -> Iterator[tuple[str, float]]:
    """From the evaluations on the whole of the run's own test images."""
    assert run.result is not None
    path = run.folder / FILE
    for evaluation in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
        if (evaluation.get("data"), evaluation.get("images")) == (run.data, run.result.test_images):
            for outcome in evaluation.get("robustness") or []:
                if outcome["name"] in METRICS:
                    yield outcome["name"], float(outcome["accuracy"]["value"])


def _diagnosis(run: RunInfo) -> dict[str, Any] | None:
    path = run.folder / DIAGNOSIS
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document["diagnoses"]
    if len(found) != 1:
        raise UserError(f"{path} is of {len(found)} models; diagnose {run.folder} alone")
    data = document.get("data", run.data)  # which older ones do not tell
    if data.partition(":")[0] != run.data.partition(":")[0]:
        raise UserError(f"{path} is on {data}, and the run on {run.data}; diagnose {run.folder} on its own data")
    return dict(found[0])


def _attention(profiles: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, float]]:
    by_layer = {
        key: {row["layer"]: row["mean"] for row in rows if row["head"] == "all" and row["mean"] is not None}
        for key, rows in profiles.items()
    }
    means = {key: list(values.values()) for key, values in by_layer.items() if values}
    for key in ("entropy", "class_entropy", "distance", "token_similarity", "evolution"):
        if key in means:
            yield key, fmean(means[key])
    # Layers that nothing refines have their maps meet the values as they are.
    maps = by_layer.get("head_similarity", {}) | by_layer.get("refined_head_similarity", {})
    if maps:
        yield "map_similarity", fmean(maps.values())
    for key in ("broadcast_mean", "broadcast_ratio"):
        if len(values := means.get(key, [])) > 1:
            half = len(values) // 2
            yield f"{key}_rise", fmean(values[-half:]) - fmean(values[:half])
