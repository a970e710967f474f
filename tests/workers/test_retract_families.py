"""Every cache family under pressure: requests leave decode's device and come back, and no answer changes.

A thousand requests a family: ``make soak ARGS="tests/soak/test_retract_soak.py"``.
"""

from __future__ import annotations

import pytest

from tests.support.family_scenes import Family, make_family
from tests.support.model_families import FAMILIES
from tests.support.retract_scenes import (
    expect_each_buffer_is_swapped_and_read,
    expect_same_answers,
    expect_swapped_damage_is_caught,
)

pytestmark = pytest.mark.slow

QUICK = ("llama", "deepseek_v3", "deepseek_v32", "gemma3", "qwen3_next", "falcon_h1")
"""One of each kind of cache: full, latent, sparse, window, gated delta, Mamba; the others are for the soak."""


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp("families"))


def test_fifty_requests_in_a_tenth_of_the_memory_get_the_answers_of_an_undisturbed_run(family: Family) -> None:
    calm, short = expect_same_answers(family, 50, at_once=50, longest=32, answer=16)
    print(f"{family.name}: enough memory {calm}; a tenth {short}")


def test_a3_each_buffer_of_a_swapped_out_request_has_a_tag_that_tells_of_damage(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    expect_swapped_damage_is_caught(family, caplog)


def test_a3_each_buffer_of_a_swapped_out_request_is_copied_and_read_again(family: Family) -> None:
    expect_each_buffer_is_swapped_and_read(family)
