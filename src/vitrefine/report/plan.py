"""What a comparison sets out to do. Kept in its folder: for resuming it, and for pages that are made of it later."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.report.results import bare, label
from vitrefine.surgery.registry import canonicalise
from vitrefine.surgery.spec import continue_from, parse
from vitrefine.train.resume import deciding
from vitrefine.train.saved import read_saved

PLAN = "compare.json"


@dataclass(frozen=True)
class Plan:
    """Specs × seeds on one data set with one recipe."""

    specs: tuple[str, ...]  # the first is what the others are compared with
    seeds: int  # from 0 on
    data: str
    recipe_name: str
    recipe: str  # YAML, overrides included
    command: str
    weights: str | None = None  # where all of them start

    def runs(self) -> Iterator[tuple[int, str]]:
        """Seed and spec of each run. Seed by seed: what is there when it is interrupted can be compared."""
        return itertools.product(range(self.seeds), self.specs)

    def folder(self, spec: str, seed: int) -> str:
        """The name of a run's folder, which does not depend on the other specs."""
        named = label(spec, self.specs[0]).lstrip("+")
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", bare(named)).strip("-.")[:40]
        return f"{name if name == named else f'{name}-{short_hash(spec)}'}-s{seed}"


def short_hash(*texts: str) -> str:
    """Six digits that tell texts apart."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6]


def read_specs(texts: Sequence[str]) -> tuple[str, ...]:
    """The specs of a command line in canonical form; a leading + continues the first one."""
    if texts[0].lstrip().startswith("+"):
        raise UserError(f"the first spec, {texts[0]}, has no model to continue; write vit_tiny_patch16_224 {texts[0]}")
    first = parse(texts[0])
    specs = [str(canonicalise(continue_from(first, text))) for text in texts]
    for place, spec in enumerate(specs):
        if spec in specs[:place]:
            raise UserError(f"{texts[place]} is the same as {texts[specs.index(spec)]}; leave one of them out")
    return tuple(specs)


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the plan into the comparison's folder."""
    replace_file(folder / PLAN, (json.dumps(asdict(plan), indent=2, ensure_ascii=False) + "\n").encode())


def read_plan(folder: Path) -> Plan | None:
    """The plan in a folder; None if it holds no comparison."""
    path = folder / PLAN
    if not path.is_file():
        return None
    return read_saved(path, TypeAdapter(Plan), "choose another folder, or delete it to see the runs without their plan")


def check_folder(folder: Path, plan: Plan, resume: bool) -> None:
    """Refuse a folder that holds something else, or the same where nobody asked to continue it."""
    if not folder.exists() or not (folder.is_dir() and any(folder.iterdir())):
        return
    earlier = read_plan(folder)
    if earlier is None:
        raise UserError(f"{folder} holds something else than a comparison; choose another folder with --out")
    if not resume:
        raise UserError(f"{folder} holds a comparison already; go on with it with --resume, or choose another --out")
    for what, then, now in (
        ("first spec", earlier.specs[0], plan.specs[0]),
        ("data", earlier.data, plan.data),
        ("recipe", *(deciding(yaml.safe_load(one.recipe)) for one in (earlier, plan))),
        ("start", earlier.weights or "from scratch", plan.weights or "from scratch"),
    ):
        if then != now:
            told = f"its {what} is {then}, not {now}" if what != "recipe" else "its recipe has other settings"
            raise UserError(f"{folder} holds another comparison: {told}; use what it had, or another --out")
