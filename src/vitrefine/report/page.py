"""One self-contained HTML page out of runs: the answer first, then figures, curves, and how to have it again."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup, escape

from vitrefine.files import replace_file
from vitrefine.report import words
from vitrefine.report.collect import Collection
from vitrefine.report.frame import environment
from vitrefine.report.results import Group, bare
from vitrefine.report.section import section

PAGE = "report.html"


def write_page(collection: Collection, path: Path) -> None:
    """Write the page of some runs."""
    replace_file(path, render(collection).encode())


def render(collection: Collection) -> str:
    """The page of some runs, as text."""
    groups = collection.groups
    sections = [section(f"group-{i}", group, collection) for i, group in enumerate(groups)]
    for shown, group in zip(sections, groups, strict=True):
        shown["apart"] = _apart(group, groups[0])
    single = len(groups) == 1
    runs = words.plural(sum(len(group.runs) for group in groups), "run")
    template = _environment(arm.label for group in groups for arm in group.arms).get_template("page.html.j2")
    return template.render(
        title=_title(groups),
        summary=sections[0]["summary"] if single else runs,
        headline=sections[0]["headline"] if single else _several(groups),
        groups=sections,
        left_out=collection.left_out,
        pictures=[picture for shown in sections for picture in shown["pictures"]],
    )


def _title(groups: Sequence[Group]) -> str:
    labels = [arm.label for arm in groups[0].arms]
    more = " …" if len(labels) > 4 or len(groups) > 1 else ""
    return f"{', '.join(labels[:4])}{more} on {groups[0].first.data}"


def _several(groups: Sequence[Group]) -> str:
    runs = [group.first for group in groups]
    kinds = {
        "data": len({run.fingerprint for run in runs}),
        "recipes": len({frozenset(run.settings.items()) for run in runs}),
        "weights to start from": len({run.weights for run in runs}),
    }
    differ = words.listing([kind for kind, count in kinds.items() if count > 1])
    return (
        f"{len(groups)} groups of runs, with different {differ}. "
        "What was trained or tested differently is shown, but not compared."
    )


def _apart(group: Group, first: Group) -> str:
    """What sets a group's images, recipe and start apart from those of the first group."""
    usual, own = first.first.conditions, group.first.conditions
    if group.first.data == first.first.data:  # else it is told already
        usual, own = ({"fingerprint": one.first.fingerprint, **of} for one, of in ((first, usual), (group, own)))
    changed = [f"{key}={own.get(key, 'left out')}" for key in {**own, **usual} if own.get(key) != usual.get(key)]
    return ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")


def _environment(labels: Iterable[str]) -> Environment:
    made = environment()
    names = sorted({name for label in labels for name in (label, bare(label))}, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w+])({'|'.join(map(re.escape, names))})(?![\w(])")
    made.filters["specs"] = lambda text: _with_specs(text, pattern)
    return made


def _with_specs(text: str, pattern: re.Pattern[str]) -> Markup:
    """A sentence, escaped, with the specs in it set as such."""
    pieces = pattern.split(text)
    return Markup("").join(
        Markup('<span class="spec">{}</span>').format(piece) if place % 2 else escape(piece)
        for place, piece in enumerate(pieces)
    )
