"""The page of a diagnosis, of one model or of two side by side: what it means first, then plots, maps and numbers."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrefine.diagnose.attention import attention_maps_on, attention_rollout
from vitrefine.diagnose.diagnosis import Diagnosis, diagnose
from vitrefine.diagnose.images import InputFormat, sample_images
from vitrefine.diagnose.matrices import AttentionMatrices, attention_matrices
from vitrefine.diagnose.offsets import capture_offsets
from vitrefine.diagnose.subject import Subject
from vitrefine.diagnose.words import contrasts
from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.report import svg, words
from vitrefine.report.diagnosis_charts import charts, matrices, merging_charts
from vitrefine.report.diagnosis_pictures import looks, map_matrices, merging_pictures, query_strips, spectra
from vitrefine.report.frame import environment
from vitrefine.report.results import bare, shortened

SHOWN = 5  # images
COLUMNS = {
    "entropy": "entropy, nats",
    "class_entropy": "of the class token",
    "distance": "distance",
    "gradient": "softmax gradient",
    "head_similarity": "cosine of heads",
}


@dataclass(frozen=True)
class Examined:
    """A diagnosis, and what a few of its images look like to the model."""

    diagnosis: Diagnosis
    name: str
    weights: str
    data: str
    pictures: Tensor  # of those that are shown, from 0 to 1
    heat: dict[str, Tensor]  # by what is shown: (B, h, w), from 0 to 1
    matrices: AttentionMatrices  # of the first image
    notes: list[str]


@torch.no_grad()
def examine(subject: Subject, data: str, count: int) -> Examined:
    """Diagnose a model on images of a data set.

    Args:
        subject: The model.
        data: The data set, or a folder of images.
        count: How many images.
    """
    given = InputFormat.of(subject.model)
    sample = sample_images(data, count, given)
    images = sample.for_model(given)
    diagnosis = diagnose(subject.model, images, name=subject.name)
    some = [number * len(images) // min(SHOWN, len(images)) for number in range(min(SHOWN, len(images)))]
    like = next(subject.model.parameters())
    shown = images[some].to(like.device, like.dtype)
    heat: dict[str, Tensor] = {}
    notes: list[str] = []
    try:
        maps = attention_maps_on(subject.model, shown)
        names = ["first layer" if number == 0 else f"layer {number + 1}" for number, _ in maps]
        names[-1] = "last layer"
        heat = {names[at]: maps[at][1].float().cpu() for at in (0, len(maps) // 2, len(maps) - 1)}
        rolled = attention_rollout(subject.model, shown).float().cpu()
        least = rolled.amin(dim=(1, 2), keepdim=True)  # every patch has a share by way of the others
        heat["rolled out"] = (rolled - least) / (1 - least).clamp(min=1e-12)
    except UserError as error:
        notes.append(f"{words.first_upper(str(error))}.")
    matrices = attention_matrices(subject.model, shown[:1])
    if diagnosis.mergings:  # offsets of the images that are shown
        diagnosis = _with_offsets(diagnosis, subject, shown)
    return Examined(diagnosis, subject.name, subject.weights, data, sample.pictures[some], heat, matrices, notes)


def _with_offsets(diagnosis: Diagnosis, subject: Subject, shown: Tensor) -> Diagnosis:
    with capture_offsets(subject.model) as mergings:
        subject.model(shown)
    return replace(diagnosis, mergings=mergings.found)


def write_diagnosis(examined: Sequence[Examined], path: Path, command: Sequence[str] = ()) -> None:
    """Write the page of one diagnosis, or of two side by side."""
    replace_file(path, render(examined, command).encode())


def render(examined: Sequence[Examined], command: Sequence[str] = ()) -> str:
    """The page as text."""
    diagnoses = [each.diagnosis for each in examined]
    names = _short([each.name for each in examined])
    template = environment().get_template("diagnosis.html.j2")
    return template.render(
        title=f"Diagnosis of {' and '.join(names)}",
        summary=f"diagnosis · {examined[0].data} · {words.plural(diagnoses[0].images, 'image')}",
        headline=_headline(diagnoses, names),
        names=names,
        colours=[svg.series(place + 1) for place in range(len(names))],
        models=[_model(each, name, len(names) == 1) for each, name in zip(examined, names, strict=True)],
        attention=charts(diagnoses, names, ("entropy", "class_entropy", "distance", "gradient")),
        features=charts(diagnoses, names, ("head_similarity", "token_similarity", "evolution")),
        refined=any("refined_head_similarity" in each.profiles for each in diagnoses),
        matrices=matrices(diagnoses, names),
        learned=merging_charts(diagnoses, names),
        strips=query_strips(diagnoses),
        maps=[map_matrices(each.matrices) for each in examined],
        looks=looks([(each.pictures, each.heat) for each in examined], names),
        points=[merging_pictures(each.diagnosis, each.pictures) for each in examined],
        spectra=spectra(diagnoses),
        notes=[note for each in examined for note in each.notes],
        command=shlex.join(command),
    )


def told_apart(names: Sequence[str]) -> list[str]:
    """Names of one model or of two, which may be the same with other weights."""
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({place})" for name, place in zip(names, ("first", "second"), strict=True)]


def _short(names: Sequence[str]) -> list[str]:
    """Names for headings; of a modified first model only what was added."""
    if len(names) == 2 and names[1].startswith(f"{names[0]}+"):
        return list(shortened([names[0], names[1].removeprefix(names[0])]).values())
    if len(set(names)) == len(names):
        return list(shortened(names).values())
    return told_apart([bare(name) for name in names])


def _headline(diagnoses: Sequence[Diagnosis], names: Sequence[str]) -> str:
    if len(diagnoses) == 2:
        sentence = contrasts(names[0], names[1], diagnoses[0].profiles, diagnoses[1].profiles)[0]
        return sentence if sentence.startswith(names[1]) else words.first_upper(sentence)
    found = diagnoses[0].findings
    return words.first_upper(found[0]) if found else f"{names[0]} shows little of itself"


def _model(each: Examined, name: str, alone: bool) -> dict[str, Any]:
    diagnosis = each.diagnosis
    keys = [key for key in COLUMNS if key in diagnosis.profiles]
    by_layer: dict[str, dict[str, Any]] = {}
    for key in keys:
        for layer in diagnosis[key].layers:
            by_layer.setdefault(layer.name, {})[key] = layer
    return {
        "name": name,
        "spec": each.name,
        "weights": each.weights,
        "findings": diagnosis.findings[1 if alone else 0 :],
        "columns": [COLUMNS[key] for key in keys],
        "rows": [(layer, [_cell(found.get(key)) for key in keys]) for layer, found in by_layer.items()],
    }


def _cell(layer: Any) -> tuple[str, str]:
    if layer is None:
        return "–", ""
    share = f"{100 * layer.share:.0f}{words.PER_CENT}" if layer.share is not None else ""
    return words.number(layer.whole.mean, 3), share
