"""The ledgers of the three papers, and the page made of them."""

import re
from pathlib import Path

import pytest

from vitrefine.claims.ledger import read_ledgers
from vitrefine.claims.page import is_current
from vitrefine.claims.raw import read_raws
from vitrefine.claims.schema import Ledger
from vitrefine.data.open import open_data
from vitrefine.report.checks import check_specs
from vitrefine.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SEEDS = ROOT.parent / "shared" / "seeds"
NUMBER = re.compile(r"\d+(?:\.\d+)?")

# How many rows each table has in print, so that none is forgotten; a row with several claims is listed more than once.
ROWS = {
    "refiner": {1: 5, 2: 8, 3: 2, 4: 3, 5: 5, 6: 2, 7: 36, 8: 2, 9: 2, 10: 4, 11: 3, 12: 3, 13: 4},
    "cb": {"1": 6, "2": 3, "3a": 3, "3b": 3, "4a": 4, "4b": 4, "5": 9, "6": 9, "7": 2, "8": 3, "9": 6, "10": 4, "11": 4}
    | {"S12": 9, "S13": 3, "S14": 8, "S15": 2, "S16": 10, "S17": 10},
    "lit": {1: 4, 2: 17, 3: 4, 4: 4, 5: 6, 6: 6, 7: 6, 8: 6},
}
FIGURES = {
    "refiner": {"1", "2", "3", "4", "5", "6"},
    "cb": {"1", "2", "3", "4", "5", "6", "7a", "7b", "8", "9", "10", "S11", "S12"},
    "lit": {"1", "2", "3"},
}
SEED_FILES = {"refiner": "000_*.txt", "cb": "001_*.txt", "lit": "003_*.txt"}


@pytest.fixture(scope="module")
def ledgers() -> dict[str, Ledger]:
    return {ledger.name: ledger for ledger in read_ledgers(DOCS)}


def test_three_papers(ledgers: dict[str, Ledger]) -> None:
    assert set(ledgers) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_no_row_is_missing(ledgers: dict[str, Ledger], name: str) -> None:
    found: dict[str, set[str]] = {}
    for claim in ledgers[name].claims.values():
        table, row = claim.place
        found.setdefault(table, set()).add(
            row if "+ CB" not in row else re.sub(r", (occlusion|ImageNet-A|FGSM)$", "", row)
        )
    for table, rows in ROWS[name].items():
        have = found[f"Table {table}"]
        if (name, table) == ("cb", "2"):
            have = {row.partition(",")[0] for row in have}
        assert len(have) == rows, f"Table {table}: {sorted(have)}"
    assert {table.removeprefix("Figure ") for table in found if table.startswith("Figure")} == FIGURES[name]
    assert len(found) == len(ROWS[name]) + len(FIGURES[name])


@pytest.mark.parametrize("name", ROWS)
def test_printed_figures_are_in_the_paper(ledgers: dict[str, Ledger], name: str) -> None:
    files = list(SEEDS.glob(SEED_FILES[name]))
    if not files:
        pytest.skip("the papers' text is not here")
    text = re.sub(r"\[\d+(?:, \d+)*\]", "", files[0].read_text())  # without citations
    lines = [{float(number) for number in NUMBER.findall(line)} for line in text.splitlines()]
    for claim_id, claim in ledgers[name].claims.items():
        in_columns = name == "lit" and claim_id.startswith("table-1-")
        rows: dict[str, set[float]] = {}
        for figures in claim.printed.values():
            for who, value in figures.items():
                if value is not None:
                    rows.setdefault(who, set()).add(float(value))
        for who, values in rows.items():
            parts = [{value} for value in values] if in_columns else [values]
            assert all(any(part <= line for line in lines) for part in parts), f"{claim_id}: {who}: {values}"


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_tried_twice(ledgers: dict[str, Ledger], name: str) -> None:
    tests = [claim.test.model_dump_json() for claim in ledgers[name].claims.values() if claim.test]
    assert len(tests) == len(set(tests)), "say same_as, so that one result is not counted twice"


@pytest.mark.full
def test_what_is_to_be_tried_can_be(ledgers: dict[str, Ledger]) -> None:
    """Every spec can be built and run on images of 32×32."""
    place = ROOT.parent / "shared" / "data" / "cifar100"
    if not place.is_dir():
        pytest.skip("CIFAR-100 is not here")
    claims = [claim for ledger in ledgers.values() for claim in ledger.claims.values()]
    specs = sorted({spec for claim in claims if claim.test for spec in claim.test.specs})
    check_specs(specs, open_data(f"cifar100:{place}"), load_recipe("cifar", ()))


def test_the_page_is_current() -> None:
    assert is_current(DOCS), "make it anew with vitrefine claims"


def test_raw_results_are_whole() -> None:
    results = read_raws(DOCS)
    assert sum(path.stat().st_size for path in (DOCS / "results").iterdir()) < 5e6
    for path, raw in results.items():
        assert raw.commands[0].startswith("vitrefine train"), path
        for run in raw.runs:
            right = sum(int(digit, 16).bit_count() for digit in run.correct)
            if run.status == "finished":
                assert 100 * right / (raw.test_images or 1) == pytest.approx(run.metrics["accuracy"], abs=1e-3), path
