"""Every family through both real workers: its answers, all of its state through all tiers, and damage to any of it.

The long versions, in whole clusters, are in the soak.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.family_scenes import (
    Family,
    buffers_of,
    expect_answers,
    expect_damage_is_caught,
    expect_tiers,
    expect_unnoticed_damage_shows,
    make_family,
)
from tests.support.model_families import FAMILIES

PLANES = ("shm", "zmq")
pytestmark = [pytest.mark.slow, pytest.mark.every_parameter]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_family(request.param, tmp_path_factory.mktemp("families"))
    torch.set_num_threads(threads)


def test_answers_are_the_oracles_and_hand_overs_are_what_is_due(family: Family) -> None:
    plane = PLANES[list(FAMILIES).index(family.name) % 2]
    expect_answers(family, plane, (1, 2, 16, 17, 65, 130, 200), 10)


def test_state_of_every_kind_survives_pools_that_are_too_small_for_it(family: Family) -> None:
    expect_tiers(family, talks=5, turns=2)


def test_damage_to_any_buffer_is_caught_and_computed_again(family: Family) -> None:
    expect_damage_is_caught(family)


def test_damage_to_any_buffer_shows_where_nobody_looks_for_it(family: Family) -> None:
    expect_unnoticed_damage_shows(family)


def test_damage_to_float8_index_keys_is_caught_and_would_show(tmp_path: Path) -> None:
    family = make_family("deepseek_v32", tmp_path)
    family.cache = {"index_dtype": "fp8"}
    assert buffers_of(family.pool_set(**family.cache)) != buffers_of(family.pool_set()), "they are other buffers"
    expect_damage_is_caught(family)
    expect_unnoticed_damage_shows(family)
