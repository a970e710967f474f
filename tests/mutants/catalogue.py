"""Mutants: small changes to product code, each with the test that must notice.

Some break the rule of a hazard; for each hazard there is one at least. The others, in `kinds/`, are mistakes that a
person makes while changing this code: each is of a kind (`KINDS`). A mutant is a patch with a header:

    Hazard: A1                                               or  Kind: under-way
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
KINDS = {
    "under-way": "something is given up while a part of it is still under way",
    "after-failure": "what comes after a failure: something isn't reset, given back or tried again",
    "mixed-batch": "one of a batch is treated as another of it is, or as all of them are",
    "wrong-side": "one of two things of the same type is taken for the other: sides, lists, tiers, numbers",
    "half-way": "a protocol ends between two of its steps, or one of its words comes late, twice or never",
    "empty-value": "a check passes, or a part is left out, where a value is empty or there is none",
    "wrong-clock": "a time is read from the wrong clock or at the wrong moment, or a number is an earlier term's",
    "older-build": "a field that an older build doesn't send, or sends otherwise",
    "changed-size": "a bound, a window or a size is off by one, or isn't the one that holds after a change",
    "order": "an order between streams, threads or processes is missing",
    "look-then-act": "what was looked at has changed when it is acted upon",
    "unsaid": "somebody who has to be told of something isn't, or is told of it twice",
}
"""Kinds of mistakes, each in words."""


@dataclass(frozen=True)
class Mutant:
    """One patch."""

    path: Path
    rule: str
    """The id of a hazard, or a kind."""
    breaks: str
    test: str
    """File and name of the test that must fail, with parameters or without."""
    changes: tuple[str, ...]
    """Files that it changes."""


def load(path: Path) -> Mutant:
    """Raises `ValueError` where the header is incomplete."""
    text = path.read_text()
    fields = dict(re.findall(r"^(Hazard|Kind|Breaks|Test): (.+)$", text, re.MULTILINE))
    rules = [fields[name] for name in ("Hazard", "Kind") if name in fields]
    changes = tuple(re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE))
    if len(rules) != 1 or "Breaks" not in fields or "Test" not in fields or not changes:
        raise ValueError(f"{path.name}: it needs the lines Hazard: or Kind:, Breaks: and Test:, and a diff")
    return Mutant(path, rules[0], fields["Breaks"], fields["Test"], changes)


def all_mutants() -> list[Mutant]:
    """Those of hazards, in the order of these, and then those of kinds."""
    return sorted(map(load, FOLDER.rglob("*.patch")), key=_order)


def of_hazards() -> list[Mutant]:
    """In the order of the hazards."""
    return [m for m in all_mutants() if m.rule in HAZARDS]


def _order(mutant: Mutant) -> tuple[int, str]:
    return HAZARDS.index(mutant.rule) if mutant.rule in HAZARDS else len(HAZARDS), mutant.path.name
