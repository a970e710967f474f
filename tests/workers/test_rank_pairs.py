"""Workers of several tensor-parallel ranks: the same answers, whatever the numbers of ranks on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.layout_scenes import check_answers, check_stored
from tests.support.model_families import EVERY
from tests.support.rank_followers import RankProcesses
from tests.support.worker_pair import pair
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.contracts.ids import Role


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
    check_answers(folder, warm, *({"tp": tp, "ep": ep} for tp, ep in (prefill, decode)))


@pytest.mark.slow
def test_what_two_ranks_have_stored_one_rank_reads_and_the_other_way_round(
    model: Path, oracle: Oracle, warm: RankProcesses, tmp_path: Path
) -> None:
    check_stored(model, oracle, warm, tmp_path / "pages", [({"tp": 2}, 0), ({"tp": 1}, 192), ({"tp": 2}, 192)])
