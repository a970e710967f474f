"""Data-parallel ranks that share their experts: each row has the bits of one rank that has all experts."""

from __future__ import annotations

import queue
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
from twinpool.contracts.messages.rank_order_codec import decode, encode
from twinpool.contracts.messages.rank_orders import Order, RunStep, ServeExperts
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.runner.launched_step import serve_experts, take_part
from twinpool.engine.runner.model_runner import ModelRunner
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


class Followers:
    """The other ranks of a worker, which carry out its orders on threads of their own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._orders: list[queue.Queue[Order | None]] = [queue.Queue() for _ in range(1, size)]

    def send(self, order: Order | None) -> None:
        for each in self._orders:
            each.put(order if order is None else decode(encode(order)))

    def obey(self, rank: int, engine: ModelRunner) -> None:
        """Be rank `rank` until None comes."""
        while (order := self._orders[rank - 1].get(timeout=60)) is not None:
            if isinstance(order, RunStep):
                engine.follow(order)
            else:
                assert isinstance(order, ServeExperts)
                serve_experts(engine)


class Group:
    """Benches of a group, each with a thread of its own; of workers of several tensor-parallel ranks one for each."""

    def __init__(self, folder: Path, size: int, ranks: int = 1) -> None:
        self.meetings = [Meeting(size) for _ in range(ranks)]
        """Of the first ranks of all workers, of their second ones, and so on."""
        across = [[ExpertGroup(rank, rank) for rank in meeting.ranks()] for meeting in self.meetings]
        within = [Meeting(ranks).ranks() for _ in range(size)]
        self._places = [(worker, rank) for rank in range(ranks) for worker in range(size)]
        self._followers = [Followers(ranks) for _ in range(size)]
        self.groups = across[0]

        def bench(place: tuple[int, int]) -> Bench:
            worker, rank = place
            shard = Shard(rank, ranks, dp_rank=worker, dp=size)
            loading = {"shard": shard, "ranks": within[worker][rank], "experts": across[rank][worker]}
            if ranks > 1 and not rank:
                loading["followers"] = self._followers[worker]
            return Bench(folder, seed=worker, threads=1, loading=loading, options={"shard": Shard(rank, ranks)})

        with ThreadPoolExecutor(len(self._places)) as threads:  # Ranks of a worker load together.
            self.benches = list(threads.map(bench, self._places))

    def generate(self, prompts: Sequence[Prompts], count: int, chunk: int) -> list[Drawn]:
        """What each worker draws for its prompts, with the logits; a worker takes part until all have drained."""

        def live(number: int) -> Drawn:
            bench, (worker, rank) = self.benches[number], self._places[number]
            if rank:
                self._followers[worker].obey(rank, bench.engine)
                return [], []
            group, meeting = self.groups[worker], self.meetings[0]
            try:
                found, drawn = noting(bench), list[list[int]]()
                if prompts[worker]:
                    drawn = bench.generate_many(prompts[worker], count, chunk)
                while not group.over:
                    take_part(bench.engine, drained=True)
                    if not group.over:
                        meeting.wait_for(group.number + 1)
                return drawn, found
            except PeerDead:
                pytest.fail(f"ranks wait for each other after {[len(one) for one in meeting.calls]} collectives")
            finally:
                self._followers[worker].send(None)
                if not group.over:
                    meeting.end()

        with ThreadPoolExecutor(len(self.benches)) as threads:
            return list(threads.map(live, range(len(self.benches))))[: len(self.groups)]


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
        (meeting,) = group.meetings
        assert meeting.calls[0] == meeting.calls[1], "all ranks have called every collective"


@pytest.mark.slow
def test_workers_of_two_ranks_that_share_their_experts_have_the_bits_of_one_such_worker(tmp_path: Path) -> None:
    folder = EVERY["qwen3_moe"](tmp_path / "model", num_experts_per_tok=4)
    prompts = [texts(23, 1, 40), texts(90, seed=1)]
    one_rank = Bench(folder, threads=1)
    want = [Group(folder, 1, ranks=2).generate([mine], 6, 32)[0] for mine in prompts]
    found = Group(folder, 2, ranks=2).generate(prompts, 6, 32)
    for mine, (drawn, logits), (alone, wanted) in zip(prompts, found, want, strict=True):
        assert drawn == alone == one_rank.generate_many(mine, 6, 32)
        assert all(torch.equal(one, other) for one, other in zip(logits, wanted, strict=True))


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
