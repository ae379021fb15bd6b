"""From the text that names a model with weights to the subject of an evaluation."""

import os
from dataclasses import replace
from typing import Any

from torch import nn

from vitrefine.data.dataset import DataSet
from vitrefine.diagnose.named import run_of
from vitrefine.errors import UserError
from vitrefine.evaluate.subject import Subject, description, subject_of
from vitrefine.surgery.checkpoint import load
from vitrefine.surgery.create import create
from vitrefine.surgery.hub import HUB
from vitrefine.surgery.spec import parse
from vitrefine.train.run import MODEL


def open_subject(text: str, data: DataSet, *, pretrained: bool = False, **options: Any) -> Subject:
    """The model that a text names.

    Args:
        text: The folder of a run, a .safetensors file or a folder as `load` takes them, `hf-hub:owner/name`, or a spec.
        data: What it will be tested on.
        pretrained: Take a spec's published weights.
        options: As `subject_of` takes them.
    """
    run = run_of(text)
    if run is not None and not (run.folder / MODEL).is_file():
        raise UserError(f"the run {run.folder} has no {MODEL} yet (it is {run.status}); finish it with --resume")
    if run is None and not _is_file(text):
        return subject_of(_of_spec(text, pretrained), data, name=text, **options)
    if pretrained:
        raise UserError(f"{text} holds its own weights; leave --pretrained out")
    model = load(run.folder if run else text)
    name = run.base_spec if run else description(model)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    subject = subject_of(model, data, name=name, **options)
    return replace(subject, notes=(*subject.notes, *_classes(text, config.get("label_names"), data)))


def _is_file(text: str) -> bool:
    return text.endswith(".safetensors") or text.startswith(HUB) or os.path.exists(text)


def _of_spec(text: str, pretrained: bool) -> nn.Module:
    spec = parse(text)
    named = any(spec.base.args.get(name) for name in ("pretrained", "weights", "checkpoint_path"))
    if not pretrained and not named:
        raise UserError(
            f"{text} is a spec, and its weights would be random; add --pretrained, or name a checkpoint or a run"
        )
    return create(spec) if named else create(spec, pretrained=True)


def _classes(text: str, its: Any, data: DataSet) -> list[str]:
    """A note if classes bear other names; equal ones in another order would make a good model look like a bad one."""
    if not its or tuple(its) == data.classes:
        return []
    if sorted(its) == sorted(data.classes):
        raise UserError(f"{text} has the classes of {data.name} in another order; train and test with the same one")
    first = next(
        (pair for pair in zip(its, data.classes, strict=False) if pair[0] != pair[1]), (its[0], data.classes[0])
    )
    return [f"classes are matched by number, for their names differ: the model's {first[0]} is the data's {first[1]}"]
