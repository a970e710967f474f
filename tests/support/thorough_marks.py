"""Which tests get the marks "thorough" and "soak" without carrying them: those that a list names, and the parameters
of slow tests after the first.

`make test` leaves out tests marked thorough or soak, `make test-all` only those marked soak.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LISTS = ("thorough", "soak")
"""Marks whose tests are listed in a file of that name: left to `make test-all`, left to `make soak`."""
NAMING: dict[str, set[str]] = {mark: set() for mark in LISTS}
"""Patterns of each list that have named a test of this session."""


def mark_by_lists(item: pytest.Item) -> None:
    """Mark a test that tests/thorough.txt or tests/soak.txt names."""
    for mark in LISTS:
        patterns = _listed_for(mark, item.nodeid.partition("::")[0])
        if naming := [pattern for pattern in patterns if fnmatchcase(item.nodeid, pattern)]:
            NAMING[mark].update(naming)
            item.add_marker(mark)


def stale_patterns(mark: str) -> list[str]:
    """Patterns of a list that have named no test: to be asked once everything is collected."""
    return [pattern for pattern in _listed(mark) if pattern not in NAMING[mark]]


def mark_later_parameters(items: Iterable[pytest.Item]) -> None:
    """Mark a slow test as thorough for all of its parameters but the first that `make test` runs.

    One that has the mark `every_parameter`, as each parameter breaks by a mistake of its own, keeps all of them; so do
    claims of the scripts of tests/kernels (the mark `runs`).
    """
    begun = set[str]()
    for item in items:
        function, bracket, _ = item.nodeid.partition("[")
        if not bracket or _has(item, ("thorough", "soak", "every_parameter", "runs")):
            continue
        if function in begun and _has(item, ("slow",)):
            item.add_marker("thorough")
        begun.add(function)


def _has(item: pytest.Item, marks: Collection[str]) -> bool:
    return any(mark.name in marks for mark in item.iter_markers())


@functools.cache
def _listed(mark: str) -> tuple[str, ...]:
    """Patterns of the tests that get `mark` by its list."""
    lines = (line.strip() for line in Path(__file__).parents[1].joinpath(f"{mark}.txt").read_text().splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


@functools.cache
def _listed_for(mark: str, file: str) -> tuple[str, ...]:
    """Those of them that may name a test of `file`: there are ten thousand tests, and hundreds of patterns."""
    return tuple(pattern for pattern in _listed(mark) if fnmatchcase(file, pattern.partition("::")[0]))
