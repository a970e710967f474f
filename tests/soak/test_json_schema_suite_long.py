"""All of the JSON Schema Test Suite, many answers a schema, and how much of it is followed."""

from __future__ import annotations

import pytest

from tests.router.schemas.test_json_schema_suite import CASES, faults
from tests.support.schema_samples import accepts, grammar_of, suite
from twinpool.contracts.errors import RequestError

pytestmark = [pytest.mark.soak, pytest.mark.slow]

FOLLOWED, ACCEPTED = 0.87, 0.89
"""Of the suite's schemas, those that are followed; of the instances that fit those, the ones that may be written. Some
never are, as a schema is read more narrowly than it is meant."""


@pytest.mark.parametrize("part", range(8))
def test_whatever_is_written_for_the_whole_suite_fits(part: int) -> None:
    assert [fault for case in CASES[part::8] for fault in faults(case, range(24))] == []


def test_most_of_the_suite_is_followed_and_most_of_what_fits_may_be_written() -> None:
    schemas = followed = fitting = accepted = 0
    for case in suite():
        schemas += 1
        try:
            grammar = grammar_of(case.schema)
        except RequestError:
            continue
        followed += 1
        fitting += len(case.valid)
        accepted += sum(accepts(grammar, value) for value in case.valid)
    print(f"{followed} of {schemas} schemas are followed; {accepted} of {fitting} instances may be written")
    assert followed >= FOLLOWED * schemas
    assert accepted >= ACCEPTED * fitting
