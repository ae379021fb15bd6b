"""Evaluate a model: accuracy, robustness, receptive-field calibration and speed, in one call."""

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrefine import __version__
from vitrefine.data.dataset import DataSet
from vitrefine.data.open import open_data
from vitrefine.errors import UserError, check_choice
from vitrefine.evaluate.accuracy import choices, measure_accuracy
from vitrefine.evaluate.cache import Cache, default_folder
from vitrefine.evaluate.evaluation import PARTS, Evaluation
from vitrefine.evaluate.images import ImageSet
from vitrefine.evaluate.open import open_subject
from vitrefine.evaluate.predictions import Examiner, Watcher, silent
from vitrefine.evaluate.rfc import RATIOS, calibrate
from vitrefine.evaluate.robustness import REPEATS, measure_robustness, usual_trials
from vitrefine.evaluate.speed import measure_speed
from vitrefine.evaluate.subject import subject_of
from vitrefine.files import user_path
from vitrefine.train.device import in_words

SUITES = PARTS


def evaluate(
    model: nn.Module | str,
    data: DataSet | str,
    suites: Sequence[str] = ("accuracy",),
    *,
    pretrained: bool = False,
    limit: int | None = None,
    size: tuple[int, int] | None = None,
    crop_ratio: float | None = None,
    ratios: Sequence[float] = RATIOS,
    repeats: int = REPEATS,
    seed: int = 0,
    batch: int = 64,
    workers: int = 4,
    device: str | torch.device | None = None,
    precision: str = "fp32",
    cache: str | Path | bool | None = True,
    watch: Watcher = silent,
) -> Evaluation:
    """Test a model.

    Args:
        model: A model, or what `open_subject` takes: a run, a checkpoint, a spec with weights.
        data: A data set, or the text that names one.
        suites: Of `accuracy`, `robustness`, `rfc` and `speed`; or `all`.
        pretrained: Take a spec's published weights.
        limit: Test on so many images at most, drawn at random.
        size: Of the images; the model's own if None.
        crop_ratio: At test time; the model's own if None.
        ratios: That `rfc` tries.
        repeats: Draws of each noise.
        seed: Of everything random.
        batch: Images at once.
        workers: Processes that read images.
        device: A GPU, if there is one, where None is given.
        precision: `fp32` or `bf16`.
        cache: Folder for predictions, none if None or False. True: the usual one, but only for a model that is named;
            of one in memory, weights do not tell what its code does, and what was hooked into it.
        watch: Told how far it is.
    """
    wanted = _wanted(suites)
    data = open_data(data) if isinstance(data, str) else data
    options: dict[str, Any] = {"size": size, "crop_ratio": crop_ratio, "device": device, "precision": precision}
    if isinstance(model, str):
        subject = open_subject(model, data, pretrained=pretrained, **options)
    elif pretrained:
        raise UserError("a model in memory has its weights already; leave pretrained out, or name its spec")
    else:
        subject = subject_of(model, data, **options)
    images = ImageSet(data, subject.device, limit, seed, batch, workers)
    if cache is True:
        cache = default_folder() if isinstance(model, str) else None
    examiner = Examiner(subject, images, choices(data), Cache(user_path(str(cache))) if cache else None, watch)
    found: dict[str, Any] = {}
    notes = subject.notes
    clean = examiner.predict(what="images as they are") if wanted != {"speed"} else None
    if clean is not None:
        steps: dict[str, Callable[[], Any]] = {
            "accuracy": lambda: measure_accuracy(clean, data),
            "robustness": lambda: measure_robustness(examiner, clean, usual_trials(seed, repeats)),
            "rfc": lambda: calibrate(examiner, clean, ratios=ratios, seed=seed),
        }
        found = {name: step() for name, step in steps.items() if name in wanted}
        if lost := len(images) - len(clean):
            notes = (*notes, f"{lost:,} of {len(images):,} test images cannot be read, and are left out")
    if "speed" in wanted:
        watch("speed", 0, 1)
        found["speed"] = measure_speed(subject, batch=batch)
        watch("speed", 1, 1)
    return Evaluation(
        model=subject.name,
        weights=subject.key,
        data=data.name,
        fingerprint=data.fingerprint,
        images=len(images if clean is None else clean),
        settings={
            "size": list(subject.size),
            "crop_ratio": subject.crop_ratio,
            "mean": list(subject.mean),
            "std": list(subject.std),
            "limit": limit,
            "seed": seed,
            "precision": subject.precision,
        },
        device=in_words(subject.device),
        versions={
            "vitrefine": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": version("timm"),
        },
        notes=notes,
        **found,
    )


def _wanted(suites: Sequence[str]) -> set[str]:
    names = [suites] if isinstance(suites, str) else list(suites)
    for name in names:
        check_choice("suite", name, (*SUITES, "all"))
    return set(SUITES) if "all" in names else set(names)
