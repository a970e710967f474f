"""Every test that docs/guarantees.md names exists, and each of its sections names some."""

from __future__ import annotations

import re

import pytest

from tests.support.served_cluster import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE)))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 40
    for section in PAGE.split("\n## ")[1:-1]:
        title = section.splitlines()[0]
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        assert rows, title
        assert all("`tests/" in row for row in rows), f"{title}: a row without a test"
        assert "*Limits.*" in section or "complain" in title, f"{title}: a promise without its limits"


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_exists(name: str) -> None:
    file, _, test = name.partition("::")
    assert (ROOT / file).is_file(), f"docs/guarantees.md names {file}"
    if test:
        found = re.findall(r"^(?:async )?def (test_\w+)\(", (ROOT / file).read_text(), re.MULTILINE)
        assert test in found, f"docs/guarantees.md names {name}"
