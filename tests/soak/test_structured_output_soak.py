"""Structured output of every kind, in rounds of which each has a migration and a kill -9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.structured_cases import all_cases
from tests.support.structured_rounds import expect


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_schema_regex_and_grammar_is_followed_through_everything(tmp_path: Path) -> None:
    cases = all_cases()
    assert len(cases) == 200 + 60 + 20
    print(dict(expect(cases, tmp_path, a_round=40, retract_every=5)))
