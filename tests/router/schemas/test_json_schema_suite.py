"""The JSON Schema Test Suite: each schema is followed, and then whatever is written fits it, or it is refused."""

from __future__ import annotations

import json

import pytest

from contracts.errors import RequestError
from tests.schema_samples import SuiteCase, grammar_of, suite, why_invalid, written

CASES = list(suite())
SAMPLED = CASES[::3]
SEEDS = 2


def faults(case: SuiteCase, seeds: range) -> list[str]:
    """What is wrong with what becomes of a case: answers that don't fit, or none that ends."""
    try:
        grammar = grammar_of(case.schema)
    except RequestError as refused:
        return [] if str(refused) and refused.param == "response_format" else [f"refused without saying why: {refused}"]
    hints = json.dumps(case.schema, ensure_ascii=False)
    ended = [answer for seed in seeds if (answer := written(grammar, seed, hints)) is not None]
    found = [why_invalid(case.schema, answer, "ecmascript" in case.file) for answer in ended]
    if not ended:
        found = ["no answer ends"] if any(written(grammar, seed, hints) is None for seed in range(100, 140)) else []
    return [f"{case[:3]}: {why}" for why in found if why]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_is_written_for_a_schema_of_the_suite_fits_it(part: int) -> None:
    assert [fault for case in SAMPLED[part::4] for fault in faults(case, range(SEEDS))] == []


def test_every_file_of_the_suite_is_sampled() -> None:
    assert {case.file for case in SAMPLED if "/" not in case.file} >= {
        case.file for case in CASES if "/" not in case.file and sum(c.file == case.file for c in CASES) >= 3
    }
