"""The page: every figure with its raw file and its command, and nothing that was not computed."""

import re
from collections.abc import Callable
from pathlib import Path

from vitrefine.claims.add import add_runs
from vitrefine.claims.page import is_current, render_docs, write_page
from vitrefine.claims.raw import read_raws

Docs = Callable[..., Path]
Make = Callable[..., Path]
VIT = "vit_tiny_patch16_224"


def row(page: str, name: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if f'<a id="paper-{name}"></a>' in line]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_before_anything_was_run(make_docs: Docs) -> None:
    page = render_docs(make_docs())
    assert "| [A paper](#a-paper) | 4 | 0 | 0 | 0 | 3 | 1 |" in page
    assert "Nothing has been tried yet." in page
    assert row(page, "figure-1")[-1] == "not run: it is a drawing"
    assert row(page, "table-1-cb")[2:] == [
        "top-1 %: ViT 72.2, +CB 73.4",
        f"to be tried: top-1 accuracy of `+cb` against `{VIT}`; expected to be higher",
        f"not run: no results of `{VIT}` and `+cb` yet",
    ]
    assert "Tried on cifar100, with recipe cifar, 3 seeds, unless a row says otherwise." in page
    assert len(row(page, "table-1-se")) == 5  # the bar in its text is no border of a cell
    assert row(page, "table-2-cb")[-1] == "not run, as [Table 1: CB](#paper-table-1-cb)"


def test_every_figure_has_its_file_and_command(make_docs: Docs, runs: Path) -> None:
    docs = make_docs()
    add_runs([runs], docs)
    page = render_docs(docs)
    assert "| all | 4 | 1 | 0 | 0 | 2 | 1 |" in page
    *_, here, verdict = row(page, "table-1-cb")
    assert verdict == "**reproduced**: higher, as claimed"
    assert "difference +1.20 points (3 seeds, 95\u00a0% interval +0.70 … +1.70)" in here
    assert row(page, "table-2-cb")[-1].startswith("**reproduced**, as ")
    figures = re.findall(r"`([^`]+)` \[([\d.]+) %\]\(#([^)]+)\)", here)
    assert [(spec, value) for spec, value, _ in figures] == [(VIT, "70.07"), ("+cb", "71.27")]
    for spec, value, anchor in figures:
        after = page.split(f'<a id="{anchor}"></a>')[1]
        raw = read_raws(docs)[docs / re.findall(r"\]\(([^)]+)\)", after)[0]]
        accuracies = raw.values("accuracy").values()
        assert raw.base_spec == (spec if spec == VIT else f"{VIT}{spec}")
        assert f"{sum(accuracies) / len(accuracies):.2f}" == value
        assert after.split("```")[1].strip() == f"sh\n{raw.rerun}"
    assert "## What was tried" in page
    assert "[Table 1: CB](#paper-table-1-cb)" in page.split("## A paper")[0]


def test_the_time_of_runs_that_shared_the_hardware_says_so(make_docs: Docs, make_run: Make, tmp_path: Path) -> None:
    docs = make_docs()
    add_runs([make_run(tmp_path / "alone", VIT, 0, 700)], docs)
    assert "; 2 min 0 s a run on NVIDIA H200; " in render_docs(docs)
    add_runs([make_run(tmp_path / "shared", VIT, 1, 700, at_once=4)], docs)
    assert "; 2 min 0 s a run, up to 4 at once, on NVIDIA H200; " in render_docs(docs)


def test_a_row_says_what_is_not_usual(make_docs: Docs) -> None:
    test = "expect: higher}\n  table-1-se"
    own = "expect: higher, data: digits, recipe: other, seeds: 5, weights: w, settings: {batch: 64}}\n  table-1-se"
    docs = make_docs()
    ledger = docs / "claims" / "paper.yaml"
    ledger.write_text(ledger.read_text().replace(test, own))
    page = render_docs(docs)
    assert row(page, "table-1-cb")[3] == (
        f"to be tried: top-1 accuracy (on digits, recipe other, batch=64, from w) of `+cb` against `{VIT}`; "
        "expected to be higher, 5 seeds"
    )
    assert row(page, "table-1-se")[3].startswith("to be tried: top-1 accuracy of `+se`")


def test_every_link_leads_somewhere(make_docs: Docs, runs: Path) -> None:
    docs = make_docs()
    add_runs([runs], docs)
    page = render_docs(docs)
    headings = {re.sub(r"[^a-z0-9]+", "-", text.lower()) for text in re.findall(r"^#+ (.*)$", page, re.M)}
    targets = headings | set(re.findall(r'<a id="([^"]+)">', page))
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= targets
    assert all((docs / file).is_file() for file in re.findall(r"\((results/[^)]+)\)", page))


def test_losses_and_failures_are_kept(make_docs: Docs, make_run: Make, tmp_path: Path) -> None:
    docs = make_docs()
    for seed, (plain, squeezed) in enumerate([(700, 690), (704, 692), (698, 684)]):
        make_run(tmp_path / "runs" / f"plain-{seed}", VIT, seed, plain)
        make_run(tmp_path / "runs" / f"se-{seed}", f"{VIT}+se", seed, squeezed)
    make_run(tmp_path / "runs" / "se-3", f"{VIT}+se", 3, 0, status="failed", error="the loss is no number")
    add_runs([tmp_path / "runs"], docs)
    page = render_docs(docs)
    assert row(page, "table-1-se")[-1] == "**not reproduced**: it is lower instead"
    assert "seed 3 failed: the loss is no number" in page
    assert "for seed in 0 1 2 3; do" in page


def test_whether_it_is_current(make_docs: Docs, runs: Path) -> None:
    docs = make_docs()
    assert not is_current(docs)
    path = write_page(docs)
    assert is_current(docs)
    add_runs([runs], docs)
    assert not is_current(docs)
    write_page(docs)
    assert is_current(docs)
    path.write_text(path.read_text().replace("+1.20", "+2.20"))
    assert not is_current(docs)
