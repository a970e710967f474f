"""Workers of several ranks: what their leader retracts, the followers retract with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle
from tests.support.rank_followers import RankProcesses, rank_processes
from tests.support.worker_pair import pair
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.contracts.ids import Role


@pytest.fixture(scope="module")
def warm() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


@pytest.mark.slow
def test_every_ranks_share_of_a_retracted_request_comes_back(model: Path, oracle: Oracle, warm: RankProcesses) -> None:
    decode = {"tp": 2, "retract": "copy", "cache": {"host_bytes": 1 << 22}}
    sizes = {Role.PREFILL: 2048, Role.DECODE: 208}
    with pair(
        model, tokens=sizes, ranks=warm, transfer={"plane": "shm"}, decode=decode, faults={"retract_every": 4}
    ) as both:
        asked = prompts(1, 16, 17, 97, 40)
        answers = both.run(*[both.submit(prompt, greedy(20)) for prompt in asked], rounds=200_000)
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
        counters = both.decode.status().counters
        assert counters["retractions"] == counters["resumptions"] > 8
        assert counters["recomputed"] == counters["states_damaged_swapped"] == 0
