"""Structured output in a whole cluster, with a migration and a kill -9 while answers are under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.structured_cases import all_cases
from tests.support.structured_rounds import expect


@pytest.mark.slow
def test_answers_that_follow_a_grammar_are_the_same_through_retracts_a_migration_and_a_kill(tmp_path: Path) -> None:
    expect(all_cases()[::20], tmp_path, a_round=100, retract_every=15)
