"""Workers of several tensor-parallel ranks: the same answers, whatever the numbers of ranks on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.model_families import EVERY
from tests.support.rank_followers import RankProcesses, rank_processes
from tests.support.worker_pair import pair, turns
from tests.support.worker_parts import manager_of
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.contracts.ids import Role


@pytest.fixture(scope="module")
def warm() -> Iterator[RankProcesses]:
    """Processes that are started once for all of these tests."""
    with rank_processes() as processes:
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plane", "prefill", "decode"),
    [
        ("shm", 2, 1), ("zmq", 1, 2), ("nixl", 2, 1), ("nixl", 1, 2), ("nixl", 2, 2), ("staged", 2, 1),
        ("staged", 1, 2), ("staged", 2, 2),
    ],
)  # fmt: skip
def test_greedy_answers_are_the_oracles_with_ranks_on_one_side_and_on_both(
    model: Path, oracle: Oracle, warm: RankProcesses, plane: str, prefill: int, decode: int
) -> None:
    sections: dict[str, Any] = {"transfer": {"plane": plane}, "cache": {"page_tokens": 16}}
    with pair(
        model,
        tokens=2048,
        ranks=warm,
        prefill={"chunk_tokens": 96, "tp": prefill},
        decode={"tp": decode},
        **sections,
    ) as both:
        asked = prompts(1, 1, 16, 17, 97, 200)
        asked.append(asked[-1][:150] + asked[1])
        answers = both.run(*[both.submit(p, greedy(8)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
            received = answer.progress[Role.DECODE].transfer_bytes
            assert received == -(-len(prompt) // 16) * 512 * 16 or answer is answers[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [("gpt_oss", (2, 2), (1, 1)), ("qwen3_moe", (2, 1), (2, 2)), ("deepseek_v32", (2, 2), (2, 2))],
)
def test_greedy_answers_are_the_oracles_with_experts_spread_over_ranks(
    tmp_path: Path, warm: RankProcesses, family: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    """(tp, ep) of both sides."""
    folder = EVERY[family](tmp_path / "model")
    oracle = Oracle(folder)
    with pair(
        folder,
        tokens=2048,
        ranks=warm,
        transfer={"plane": "shm"},
        prefill={"chunk_tokens": 64, "tp": prefill[0], "ep": prefill[1]},
        decode={"tp": decode[0], "ep": decode[1]},
    ) as both:
        asked = prompts(1, 17, 97, 150)
        answers = both.run(*[both.submit(p, greedy(8)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)


@pytest.mark.slow
def test_what_two_ranks_have_stored_one_rank_reads_and_the_other_way_round(
    model: Path, oracle: Oracle, warm: RankProcesses, tmp_path: Path
) -> None:
    """Pools so small that the device and the host forget; storage outlives the workers, whatever their ranks."""
    (prompt, *others) = prompts(8, 200, 180, 190, 170)
    storage = {"backend": "file", "path": str(tmp_path / "pages")}
    tiers: dict[str, Any] = {"host_bytes": 1 << 20, "storage": storage, "prefetch": {"policy": "wait_complete"}}
    for ranks, hits in ((2, 0), (1, 192), (2, 192)):
        with pair(
            model, tokens=512, ranks=warm, transfer={"plane": "shm"}, cache={**tiers, "load_back": "always"},
            prefill={"tp": ranks},
        ) as both:  # fmt: skip
            (answer,) = both.run(both.submit(prompt, greedy(8)))
            expect_equal(oracle, prompt, answer)
            assert answer.progress[Role.PREFILL].cached_by_tier.get("storage", 0) == hits, ranks
            for other in others:
                expect_equal(oracle, other, *both.run(both.submit(other, greedy(4))))
            (again,) = both.run(both.submit(prompt, greedy(8)))
            expect_equal(oracle, prompt, again)
            assert again.progress[Role.PREFILL].cached_tokens == 192
            for number in turns(50):
                both.step()
                if number >= 49 and not manager_of(both.prefill).busy:
                    break
