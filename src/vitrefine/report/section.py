"""What the page shows of one group of runs: everything that `templates/group.html.j2` asks for."""

import shlex
from collections.abc import Sequence
from typing import Any

from vitrefine.report import findings, notes, svg, words
from vitrefine.report.attention import Picture, look
from vitrefine.report.cells import cells
from vitrefine.report.collect import Collection
from vitrefine.report.curves import curves
from vitrefine.report.differences import differences
from vitrefine.report.entropies import entropies
from vitrefine.report.evaluation import evaluations
from vitrefine.report.problems import problems
from vitrefine.report.results import Group, Run

Shown = dict[str, Any]


def section(name: str, group: Group, collection: Collection) -> Shown:
    """The group's part of the page.

    Args:
        name: Begins all ids in it.
        group: The runs.
        collection: All that the page is about.
    """
    table = findings.rows(group)
    labels = [arm.label for arm in group.arms]
    return {
        "name": name,
        "labels": labels,
        "names": list(findings.short_names(group).values()),
        "colours": [svg.series(i) for i in range(len(labels))],
        "dashes": [svg.css_dashes(i) for i in range(len(labels))],
        "summary": notes.summary(group),
        "headline": findings.headline(group, table),
        "verdicts": findings.verdicts(group, table),
        "problems": problems(group),
        "problems_title": notes.problems_title(group),
        "rows": [cells(row, len(table) > 1) for row in table],
        "interval_note": notes.intervals(group, table),
        "table_note": notes.costs(group, table),
        "differences": differences(f"{name}-differences", group, table),
        "differences_note": notes.differences(table),
        "curves": curves(name, group),
        "curves_note": notes.curves(group),
        "trained": [i for i, arm in enumerate(group.arms) if any(run.epochs for run in arm.runs)],
        **_attention(name, group, labels),
        "evaluations": evaluations(f"{name}-evaluation", group),
        "facts": _facts(group),
        "commands": _commands(group, collection),
        "recipe_name": group.first.recipe_name,
        "recipe": group.first.recipe.strip(),
        "fitted": "\n".join(dict.fromkeys(arm.runs[0].fitted for arm in group.arms)),
        "runs": [_run(arm.label, run) for arm in group.arms for run in sorted(arm.runs, key=lambda run: run.seed)],
        "run_commands": "\n".join(run.command for run in group.runs if run.command),
        "reading": notes.reading(group, table),
    }


def _attention(name: str, group: Group, labels: Sequence[str]) -> Shown:
    seen = look(group, name)
    return {
        "entropy": entropies(f"{name}-entropy", group, seen.entropy),
        "entropy_note": notes.entropy(seen),
        "examined": sorted(seen.entropy),
        "pictured": sorted(seen.pictures[0].cells) if seen.pictures else [],
        "pictures": [_picture(picture, labels) for picture in seen.pictures],
        "pictures_note": notes.pictures(seen),
        "attention_notes": seen.notes,
    }


def _picture(picture: Picture, labels: Sequence[str]) -> Shown:
    cells = [
        {
            "overlay": cell.overlay,
            "verdict": f"{cell.prediction} {'✓' if cell.right else '✗'}",
            "words": f"attention of {labels[index]}, which takes it for {cell.prediction}, "
            f"{'rightly' if cell.right else 'wrongly'}",
        }
        for index, cell in sorted(picture.cells.items())
    ]
    return {**vars(picture), "cells": cells}


def _facts(group: Group) -> list[tuple[str, str]]:
    runs = group.runs
    results = [run.result for run in runs if run.result]
    seconds = sum(result.seconds for result in results)
    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, version in run.versions.items():
            versions.setdefault(package, {})[version] = None
    days = sorted(run.started[:10] for run in runs if run.started)
    facts = {
        "data": group.first.data,
        "fingerprint": group.first.fingerprint,
        "recipe": group.first.recipe_name,
        "seeds": ", ".join(map(str, group.seeds)),
        "trained": " to ".join(dict.fromkeys(days[:1] + days[-1:])),
        "training time": f"{words.duration(seconds)} in all, {words.plural(len(results), 'run')}" if results else "",
        "hardware": words.listing(list(dict.fromkeys(run.device for run in runs if run.device))),
        "versions": ", ".join(f"{package} {' and '.join(found)}" for package, found in versions.items()),
    }
    return [(name, value) for name, value in facts.items() if value]


def _commands(group: Group, collection: Collection) -> list[tuple[str, str]]:
    """What each command does, and the command."""
    first = group.first
    same = (first.data, first.recipe, first.weights)
    plans = [plan for plan in collection.plans if (plan.data, plan.recipe, plan.weights or "") == same]
    folders = shlex.join(map(str, collection.folders))
    again = ("Make this page again from the runs:", f"vitrefine report {folders}")
    return [*(("Train and compare:", plan.command) for plan in plans), again]


def _run(label: str, run: Run) -> Shown:
    shown: Shown = {"label": label, "seed": run.seed, "top1": "–", "top5": "–", "time": "–", "status": run.status}
    if run.finished and run.result:
        digits = words.decimals(run.result.test_images)
        shown["top1"], shown["top5"] = (
            f"{words.number(share, digits)}{words.PER_CENT}" for share in (run.result.top1, run.result.top5)
        )
        shown["time"] = words.duration(run.result.seconds)
    return shown
