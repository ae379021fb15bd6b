"""What is to be diagnosed: a model from a spec, a checkpoint or the folder of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vitrefine.diagnose.named import is_saved, run_of
from vitrefine.errors import UserError
from vitrefine.surgery.checkpoint import load
from vitrefine.surgery.create import create, spec_of
from vitrefine.surgery.operate import apply
from vitrefine.surgery.spec import parse
from vitrefine.train.run import MODEL

WEIGHTS = ("weights", "checkpoint_path")  # arguments of models that name weights


@dataclass(frozen=True)
class Subject:
    """A model, what to call it, and where its weights are from."""

    model: nn.Module
    name: str
    weights: str


def open_subject(
    text: str, modification: str = "", *, pretrained: bool = False, device: str | torch.device = "cpu"
) -> Subject:
    """The model that a text names.

    Args:
        text: A spec, a checkpoint, the folder of one, or the folder of a run.
        modification: What to do to it, as a spec writes it: `"+cb"`.
        pretrained: Give a spec's model its published weights, which may be downloaded.
        device: Where it goes.
    """
    subject = _open(text, pretrained, device)
    if not modification:
        return subject
    apply(subject.model, modification.removeprefix("+"))
    return Subject(subject.model, f"{subject.name}{modification}", subject.weights)


def _open(text: str, pretrained: bool, device: str | torch.device) -> Subject:
    run = run_of(text)
    if run is not None:
        if not (run.folder / MODEL).is_file():
            raise UserError(
                f"the run in {run.folder} has no model yet: it is {run.status}; finish it first, "
                "with --resume unless it is still running"
            )
        return Subject(load(run.folder / MODEL, device=device), run.base_spec, f"the run in {run.folder}")
    if is_saved(text):
        model = load(text, device=device)
        return Subject(model, str(spec_of(model)), str(Path(text)))
    torch.manual_seed(0)  # that a diagnosis without weights comes out the same twice
    spec = parse(text)
    model = create(spec, pretrained=True) if pretrained else create(spec)
    named = [str(spec.base.args[name]) for name in WEIGHTS if spec.base.args.get(name)]
    published = pretrained or spec.base.args.get("pretrained")
    weights = "the published weights" if published else " ".join(named) or "no training: random weights"
    return Subject(model.eval().to(device), text, weights)
