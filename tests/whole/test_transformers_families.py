"""Architectures without a model file through both real workers: answers, tiers, retraction, migration, damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.colocated_worker import colocated
from tests.support.family_checkpoint import WINDOW
from tests.support.family_scenes import (
    CHUNK,
    PAGE,
    Family,
    expect_answers,
    expect_damage_is_caught,
    expect_tiers,
    expect_unnoticed_damage_shows,
    greedy,
    tokens_of,
)
from tests.support.family_transformers import MAKERS
from tests.support.migration_scenes import expect_migrations_change_nothing
from tests.support.retract_scenes import expect_same_answers
from twinpool.contracts.ids import Role

THROUGH = {"models": "transformers"}
PLANES = ("shm", "zmq")
KINDS = ("granite_swa", "dots1")
"""One with windows and sinks, one with experts; the others keep nothing else."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("families")
    torch.set_num_threads(threads)


def family_of(name: str, base: Path) -> Family:
    folder = base / name
    return Family(name, folder if folder.exists() else MAKERS[name](folder), engine=dict(THROUGH))


@pytest.mark.parametrize("name", MAKERS)
def test_answers_are_the_oracles_and_hand_overs_are_what_is_due(name: str, base: Path) -> None:
    plane = PLANES[list(MAKERS).index(name) % 2]
    expect_answers(family_of(name, base), plane, (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 130, 200), 10)


@pytest.mark.parametrize("name", KINDS)
def test_state_survives_pools_that_are_too_small_for_it(name: str, base: Path) -> None:
    expect_tiers(family_of(name, base), talks=5, turns=2)


@pytest.mark.parametrize("name", KINDS)
def test_retracted_requests_get_the_answers_of_an_undisturbed_run(name: str, base: Path) -> None:
    expect_same_answers(family_of(name, base), 20, at_once=20, longest=32, answer=16)


@pytest.mark.parametrize("name", KINDS)
def test_a_migrated_request_goes_on_as_if_it_had_stayed(name: str, base: Path) -> None:
    expect_migrations_change_nothing(family_of(name, base).folder, engine=THROUGH)


@pytest.mark.parametrize("name", KINDS)
def test_damage_to_any_buffer_is_caught_and_would_show(name: str, base: Path) -> None:
    expect_damage_is_caught(family_of(name, base))
    expect_unnoticed_damage_shows(family_of(name, base))


def test_rows_of_decode_and_chunks_of_prompts_share_a_step(base: Path) -> None:
    family = family_of("granite_swa", base)
    prompts = [tokens_of(seed, length) for seed, length in enumerate((3, 70, 130, 200))]
    with colocated(
        family.folder, tokens=16384, prefill={"chunk_tokens": CHUNK}, cache={"page_tokens": PAGE},
        colocate={"prompt_tokens": PAGE}, engine=dict(THROUGH),
    ) as both:  # fmt: skip
        asked = [both.submit(prompt, greedy(30)) for prompt in prompts]
        answers = [both.run(each)[0] for each in asked]
        counters = both.worker.status().counters
        assert counters["mixed_steps"] > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.progress[Role.PREFILL].cached_tokens == 0
        family.expect(prompt, answer.list)
