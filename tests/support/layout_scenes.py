"""What a pair of workers is put through whatever the layout of their ranks: tensor-parallel, of experts, of stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.checkpoints import Oracle
from tests.support.rank_followers import RankProcesses
from tests.support.worker_pair import pair, turns
from tests.support.worker_parts import manager_of
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.contracts.ids import Role

Layout = dict[str, int]
"""``tp``, ``ep`` and ``pp`` of a worker, as in its section of the configuration."""


def check_answers(folder: Path, ranks: RankProcesses, prefill: Layout, decode: Layout) -> None:
    """Prompts of one chunk and of several are answered as the oracle does."""
    oracle = Oracle(folder)
    with pair(
        folder,
        tokens=2048,
        ranks=ranks,
        transfer={"plane": "shm"},
        prefill={"chunk_tokens": 64, **prefill},
        decode=decode,
    ) as both:
        asked = prompts(1, 17, 97, 150)
        answers = both.run(*[both.submit(p, greedy(8)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)


def check_retracted(model: Path, oracle: Oracle, ranks: RankProcesses, layout: Layout) -> None:
    """Requests that a decode worker of so many ranks retracts again and again come back with all their state."""
    decode = {**layout, "retract": "copy", "cache": {"host_bytes": 1 << 22}}
    sizes = {Role.PREFILL: 2048, Role.DECODE: 208}
    with pair(
        model, tokens=sizes, ranks=ranks, transfer={"plane": "shm"}, decode=decode, faults={"retract_every": 4}
    ) as both:
        asked = prompts(1, 16, 17, 97, 40)
        answers = both.run(*[both.submit(prompt, greedy(20)) for prompt in asked], rounds=200_000)
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
        counters = both.decode.status().counters
        assert counters["retractions"] == counters["resumptions"] > 8
        assert counters["recomputed"] == counters["states_damaged_swapped"] == 0


def check_stored(
    model: Path, oracle: Oracle, ranks: RankProcesses, folder: Path, layouts: Sequence[tuple[Layout, int]]
) -> None:
    """What a prefill worker of one layout has stored is read by those of the next ones, so many tokens of it.

    Pools are so small that the device and the host forget; storage outlives the workers."""
    (prompt, *others) = prompts(8, 200, 180, 190, 170)
    storage = {"backend": "file", "path": str(folder)}
    tiers: dict[str, Any] = {"host_bytes": 1 << 20, "storage": storage, "prefetch": {"policy": "wait_complete"}}
    for layout, hits in layouts:
        with pair(
            model, tokens=512, ranks=ranks, transfer={"plane": "shm"}, cache={**tiers, "load_back": "always"},
            prefill=layout,
        ) as both:  # fmt: skip
            (answer,) = both.run(both.submit(prompt, greedy(8)))
            expect_equal(oracle, prompt, answer)
            assert answer.progress[Role.PREFILL].cached_by_tier.get("storage", 0) == hits, layout
            for other in others:
                expect_equal(oracle, other, *both.run(both.submit(other, greedy(4))))
            (again,) = both.run(both.submit(prompt, greedy(8)))
            expect_equal(oracle, prompt, again)
            assert again.progress[Role.PREFILL].cached_tokens == 192
            for number in turns(50):
                both.step()
                if number >= 49 and not manager_of(both.prefill).busy:
                    break
