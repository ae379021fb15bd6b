"""Walking timm's registry and measuring what works on each family.

    python -m vitrefine.surgery.census

rewrites `zoo.json` beside this file and, where there is a folder docs, the page `docs/zoo.md`; it takes about half an
hour on two cores. Any exception but a `UserError` is a fault of ours, and ends it.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.graft import strip
from vitrefine.surgery.inputs import example_inputs
from vitrefine.surgery.operate import apply
from vitrefine.surgery.registry import names
from vitrefine.surgery.survey import Survey, survey
from vitrefine.surgery.zoo import PAGE, Outcome, Row, Zoo, markdown

# Those that leave outputs as they were at the start, some of them only in this form.
EQUAL_AT_START = {
    "cb_s": "cb_s",
    "uniform_head": "uniform_head(mode=append)",
    "refiner": "refiner",
    "dla": "dla",
    "expansion": "expansion",
    "talking_heads": "talking_heads",
    "dtm": "dtm",
    "extra_block": "extra_block",
}

# Arguments that make a model small enough to be run; what it is made of stays the same.
SMALLER: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 2},
    "deepseek_vit_412m": {"depth": 2},
    "gemma4_vit_167m": {"depth": 2},
    "naflexvit_base_patch16_parfac_gap": {"depth": 2},
    "qwen3_vit_88m": {"depth": 2},
    "samvit_base_patch16_224": {"depth": 2},
}


def families() -> list[str]:
    """The model modules of timm itself, without those that others have registered there."""
    return [family for family in timm.list_modules() if _own(family)]


def _own(family: str) -> list[str]:
    models = timm.list_models(module=family)
    return [name for name in models if timm.model_entrypoint(name).__module__.startswith("timm.")]


def members(family: str) -> dict[str, int]:
    """The models of a family and their parameters, the smallest first."""
    counts = {name: count_parameters(name) for name in _own(family)}
    return dict(sorted(counts.items(), key=lambda item: item[1]))


def count_parameters(name: str) -> int:
    """The number of parameters of one of timm's models, without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name).parameters())


def create(name: str) -> nn.Module:
    """A model with random weights, of a size that can be run."""
    torch.manual_seed(0)
    return disturb(timm.create_model(name, **SMALLER.get(name, {})).eval())


@torch.no_grad()
def disturb(model: nn.Module) -> nn.Module:
    """Move all weights off their start by a tenth of their size; those at zero, or nearly, by a tenth.

    Models start some at zero (the head, the last norm of a branch, its scale), and that hides what is behind them.
    """
    for parameter in model.parameters():
        size = parameter.square().mean().sqrt().item()
        parameter.add_(torch.randn_like(parameter), alpha=0.1 * (size if size > 1e-3 else 1.0))
    return model


def kind_of_attention(found: Survey) -> str:
    """`softmax`, `other` or `none`."""
    return "softmax" if found.attentions else "other" if found.mixes_tokens else "none"


def measure_family(family: str) -> list[Row]:
    """The rows of a family: of its smallest member and, if that has none, of the smallest with softmax attention."""
    sizes = members(family)
    first, *others = sizes
    rows = [measure(first)]
    if rows[0].attention != "softmax":
        second = next((name for name in others if _has_token_maps(name)), None)
        rows += [measure(second, smallest=False)] if second else []
    return rows


def _has_token_maps(name: str) -> bool:
    with torch.device("meta"):
        return any(not site.odd for site in survey(timm.create_model(name)).attentions)


def measure(name: str, *, smallest: bool = True) -> Row:
    """Try every modification on one of timm's models."""
    family = timm.model_entrypoint(name).__module__.rpartition(".")[2]
    model = create(name)
    torch.manual_seed(1)
    image = torch.randn(1, *example_inputs(model)[""].shape[1:])
    before = _run(model, image)
    kind = kind_of_attention(survey(model))
    tried = names() if kind != "none" else ["cb"]  # its sentence is the reason for all
    outcomes = {modification: _try(model, modification, image, before) for modification in tried}
    return Row(family, name, count_parameters(name), kind, SMALLER.get(name, {}), smallest, outcomes)


def _try(model: nn.Module, modification: str, image: Tensor, before: Tensor) -> Outcome:
    try:
        report = apply(model, modification)
    except UserError as error:
        return Outcome(reason=str(error))
    after = _run(model, image)
    strip(model)
    equal = EQUAL_AT_START.get(modification)
    if equal not in (None, modification):
        try:
            apply(model, equal)
            after = _run(model, image)
            strip(model)
        except UserError:
            equal = None
    difference = float(f"{((after - before).norm() / before.norm()).item():.1e}") if equal else None
    return Outcome("", report.places, report.new_parameters, difference)


@torch.no_grad()
def _run(model: nn.Module, image: Tensor) -> Tensor:
    output = model(image)
    return output if isinstance(output, Tensor) else output[0]


def walk() -> Iterator[Row]:
    """Every family of timm."""
    for family in families():
        yield from measure_family(family)


def main() -> None:
    """Measure, and write what was found where it belongs."""
    rows = []
    for row in walk():
        rows.append(row)
        print(row.family, row.model, row.attention, sum(o.works for o in row.outcomes.values()), flush=True)
    zoo = Zoo({"timm": timm.__version__, "torch": torch.__version__.partition("+")[0]}, tuple(rows))
    Path(__file__).with_name("zoo.json").write_text(zoo.to_json(), encoding="utf-8")
    if Path(PAGE).parent.is_dir():
        Path(PAGE).write_text(markdown(zoo), encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
