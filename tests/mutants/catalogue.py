"""Mutants: for each hazard, the small change to product code that breaks its rule, and the test that must notice.

A mutant is a patch with a header:

    Hazard: A1
    Breaks: a step touches a layer without waiting for its loads
    Test: tests/cache/device/test_hazards_device.py::test_a1_...

`run.py` shows that each test passes without its mutant and fails with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
_GROUPS = {"A": 12, "B": 10, "C": 11, "D": 10}
HAZARDS = tuple(f"{group}{n}" for group, last in _GROUPS.items() for n in range(1, last + 1))


@dataclass(frozen=True)
class Mutant:
    """One patch."""

    path: Path
    hazard: str
    breaks: str
    test: str
    """File and name of the test that must fail, with parameters or without."""
    changes: tuple[str, ...]
    """Files that it changes."""


def load(path: Path) -> Mutant:
    """Raises `ValueError` where the header is incomplete."""
    text = path.read_text()
    fields = dict(re.findall(r"^(Hazard|Breaks|Test): (.+)$", text, re.MULTILINE))
    changes = tuple(re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE))
    if len(fields) < 3 or not changes:
        raise ValueError(f"{path.name}: it needs the lines Hazard:, Breaks: and Test:, and a diff")
    return Mutant(path, fields["Hazard"], fields["Breaks"], fields["Test"], changes)


def all_mutants() -> list[Mutant]:
    """In the order of the hazards."""
    found = [load(path) for path in FOLDER.glob("*.patch")]
    return sorted(found, key=lambda m: (m.hazard[0], int(m.hazard[1:]), m.path.name))
