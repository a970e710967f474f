"""docs/hazards.md: every rule has its row, and the files and tests that a row names are there and bear its name."""

from __future__ import annotations

import re

import pytest

from tests.mutants.catalogue import HAZARDS, of_hazards
from tests.support.served_cluster import ROOT

PAGE = (ROOT / "docs" / "hazards.md").read_text()
LINES = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [A-D]\d+ \|", line)]
ROWS = {cells[0]: cells[1:] for cells in LINES}
FOLDERS = (
    "docs",
    "tests",
    "bench",
    "contracts",
    "cache",
    "transfer",
    "engine",
    "worker",
    "prefill",
    "decode",
    "router",
)


def test_every_rule_has_one_row_in_order() -> None:
    assert [cells[0] for cells in LINES] == list(HAZARDS)
    assert all(len(row) == 4 and all(row) for row in ROWS.values())


@pytest.mark.parametrize("hazard", HAZARDS)
def test_what_a_row_names_is_there(hazard: str) -> None:
    _, _, kept, shown = ROWS[hazard]
    files = re.findall(r"`([\w./]+/[\w.]+)`", kept)
    assert files, "where is it kept?"
    for file in files:
        assert (ROOT / file).is_file(), f"{hazard} names {file}"
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown)
    assert tests
    for file, name in tests:
        assert (ROOT / file).is_file(), f"{hazard} names {file}"
        if name:
            assert name.startswith(f"test_{hazard.lower()}_"), f"{hazard} names {name}"
            assert f"def {name}(" in (ROOT / file).read_text(), f"{hazard} names {file}::{name}"
    assert any(name for _, name in tests), f"{hazard} names no test that bears its name"


def test_every_mutant_breaks_a_rule_of_the_page() -> None:
    for mutant in of_hazards():
        assert mutant.rule in ROWS, f"{mutant.path.name} breaks {mutant.rule}, which is no row"


@pytest.mark.parametrize("hazard", HAZARDS)
def test_the_page_names_a_place_that_a_mutant_of_the_rule_breaks(hazard: str) -> None:
    broken = {name for mutant in of_hazards() if mutant.rule == hazard for name in mutant.changes}
    assert any(f"`{name}`" in ROWS[hazard][2] for name in broken), f"{hazard} is kept in {sorted(broken)} too"


def test_every_rule_that_source_or_pages_name_is_on_the_page() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                for named in re.findall(r"\b[Hh]azards? ([A-D]\d+)\b", path.read_text()):
                    assert named in ROWS, f"{path.relative_to(ROOT)} names {named}"
