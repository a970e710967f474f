"""Data-parallel ranks that share their experts: each row has the bits of one rank that has all experts."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench
from tests.support.model_families import EVERY
from tests.support.thread_ranks import Meeting
from twinpool.contracts.errors import PeerDead
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.runner.launched_step import take_part
from twinpool.engine.tensors.shard import Shard

Prompts = Sequence[Sequence[int]]
Drawn = tuple[list[list[int]], list[Tensor]]
"""Tokens by prompt, and the logits of the steps."""


def texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(5, 90) for _ in range(length)] for length in lengths]


def noting(bench: Bench) -> list[Tensor]:
    """The logits that its steps compute from now on, step by step."""
    found: list[Tensor] = []
    logits = bench.engine.decoder.logits

    def noted(x_nh: Tensor, numerics: object) -> Tensor:
        found.append(logits(x_nh, numerics).clone())  # type: ignore[arg-type]
        return found[-1]

    bench.engine.decoder.logits = noted  # type: ignore[method-assign]
    return found


class Group:
    """Benches of a group, each with a thread of its own."""

    def __init__(self, folder: Path, size: int) -> None:
        self.meeting = Meeting(size)
        self.groups = [ExpertGroup(rank, rank) for rank in self.meeting.ranks()]
        self.benches = [
            Bench(folder, seed=rank, threads=1, loading={"shard": Shard(dp_rank=rank, dp=size), "experts": group})
            for rank, group in enumerate(self.groups)
        ]

    def generate(self, prompts: Sequence[Prompts], count: int, chunk: int) -> list[Drawn]:
        """What each rank draws for its prompts, with the logits; a rank takes part until all have drained."""

        def live(rank: int) -> Drawn:
            bench, group = self.benches[rank], self.groups[rank]
            try:
                found, drawn = noting(bench), list[list[int]]()
                if prompts[rank]:
                    drawn = bench.generate_many(prompts[rank], count, chunk)
                while not group.over:
                    take_part(bench.engine, drained=True)
                    if not group.over:
                        self.meeting.wait_for(group.number + 1)
                return drawn, found
            except PeerDead:
                pytest.fail(f"ranks wait for each other after {[len(one) for one in self.meeting.calls]} collectives")
            finally:
                if not group.over:
                    self.meeting.end()

        with ThreadPoolExecutor(len(self.benches)) as threads:
            return list(threads.map(live, range(len(self.benches))))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32"])
def test_rows_have_the_bits_of_one_rank_whoever_else_is_in_the_step(tmp_path: Path, family: str) -> None:
    # With two experts a row either order of their sum has the same bits.
    folder = EVERY[family](tmp_path / "model", num_experts_per_tok=4)
    prompts = [texts(23, 1, 40), texts(90, seed=1)]
    alone = Bench(folder, threads=1)
    for shares in (prompts, [prompts[0], []], [[], prompts[1]]):
        group = Group(folder, 2)
        found = group.generate(shares, 6, 32)
        for mine, (drawn, logits) in zip(shares, found, strict=True):
            want = noting(alone)
            assert drawn == (alone.generate_many(mine, 6, 32) if mine else [])
            assert len(logits) == len(want)
            assert all(torch.equal(one, other) for one, other in zip(logits, want, strict=True))
        assert group.meeting.calls[0] == group.meeting.calls[1], "all ranks have called every collective"


@pytest.mark.slow
def test_a_rank_computes_and_holds_no_expert_of_another_and_idle_steps_are_counted(tmp_path: Path) -> None:
    folder = EVERY["qwen3_moe"](tmp_path / "model")
    group = Group(folder, 4)
    group.generate([texts(20), [], [], []], 3, 16)
    first, second = group.groups[0].counters, group.groups[1].counters
    # Two chunks, two further tokens, and the step in which all say that they have drained.
    assert first["dp_steps"] == second["dp_steps"]
    assert second["dp_idle_steps"] == second["dp_steps"]
    assert first["dp_idle_steps"] == first["dp_steps"] - 4
    assert (first["dp_idle_rows"], second["dp_idle_rows"]) == (0, 16 + 4 + 1 + 1)
    held = [bench.engine.decoder.mixtures[0].held.numbers for bench in group.benches]  # type: ignore[attr-defined]
    assert [number for numbers in held for number in numbers] == list(range(held[-1].stop))


def test_nobody_is_told_of_a_step_while_nobody_computes() -> None:
    (rank,) = Meeting(1).ranks()
    group = ExpertGroup(rank, rank)
    assert not group.due
    group.drained = True
    assert group.due, "the others have to know"
    group.begin(0)
    assert group.over
    assert not group.due
    with pytest.raises(PeerDead, match="have left"):
        group.begin(1)


def test_a_drain_that_is_taken_back_is_told_and_the_group_goes_on() -> None:
    meeting = Meeting(2)
    groups = [ExpertGroup(rank, rank) for rank in meeting.ranks()]

    def step(*drained: bool) -> None:
        for group, one in zip(groups, drained, strict=True):
            group.drained = one
        threads = [threading.Thread(target=group.begin, args=(0,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    for drained in ((True, False), (False, False), (False, True)):
        step(*drained)
        assert not any(group.over or group.due for group in groups)
    step(True, True)
    assert all(group.over for group in groups)


def test_a_rank_that_is_gone_ends_the_steps_of_the_others() -> None:
    first, second = Meeting(2).ranks()
    group = ExpertGroup(first, first)
    threading.Thread(target=second.close).start()
    with pytest.raises(PeerDead):
        group.begin(3)
