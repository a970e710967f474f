"""A thousand requests a family in a tenth of the memory that they need, all retracted every seventh step.

Prints how often requests left and came back, and the time lost against enough memory. A slice:
``make soak ARGS="tests/soak/test_retract_soak.py -k gemma3 -s"``.
"""

from __future__ import annotations

import pytest

from tests.support.family_scenes import Family, make_family
from tests.support.model_families import FAMILIES
from tests.support.retract_scenes import expect_same_answers

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp("families"))


def test_a_thousand_requests_in_a_tenth_of_the_memory_get_the_answers_of_an_undisturbed_run(family: Family) -> None:
    calm, short = expect_same_answers(family, 1000, at_once=100, longest=200, answer=60)
    lost = short.seconds / calm.seconds - 1
    print(f"\n{family.name}: enough memory {calm}; a tenth {short}; {lost:+.0%} time")
