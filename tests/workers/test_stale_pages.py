"""A page that is given away while a request still uses it: found by the step, never answered from, and served anyway.

The allocators here are made to go wrong on purpose; no exit path of ours does this.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Oracle, compare
from tests.support.worker_pair import Pair, pair
from tests.support.worker_parts import manager_of, pages_of, scheduler_of, table_of
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import DecodePhase
from twinpool.prefill.request import PrefillRequest

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(n)] for n in lengths]


def decoding(both: Pair, request: RequestId, tokens: int) -> None:
    while len(both.answers[request].tokens) < tokens:
        both.step()


def test_decode_drops_what_a_step_drew_from_a_stale_page_and_the_attempt_can_be_repeated(
    model: Path, oracle: Oracle
) -> None:
    first, second = prompts(41, 40, 50)
    with pair(model) as both:
        a, b = both.submit(first, GREEDY), both.submit(second, GREEDY)
        decoding(both, a, 3)
        decoding(both, b, 2)
        victim = next(r for r in table_of(both.decode) if r.submit.request_id == a)
        assert victim.phase is DecodePhase.RUNNING
        assert victim.allocation is not None
        before = dict(both.answers[a].tokens)
        manager_of(both.decode).pools.allocators["full"].epochs.bump(victim.allocation.tables["full"].pages[1:2])
        failed, fine = both.run(a, b)
        assert failed.done is not None
        assert failed.done.error is ErrorKind.WORKER
        assert failed.done.error.retryable
        assert failed.tokens == before, "nothing was emitted that the stale page had a part in"
        assert both.decode.status().counters["stale_pages"] == 1
        assert compare(oracle, second, fine.list).equal
        emitted = failed.list
        (again,) = both.run(both.submit(first, GREEDY, emitted=emitted))
        assert compare(oracle, first, emitted + again.list).equal


def test_prefill_starts_over_when_pages_of_a_request_were_given_away(model: Path, oracle: Oracle) -> None:
    first, second = prompts(42, 150, 90)
    with pair(model, prefill={"chunk_tokens": 64}) as both:
        a = both.submit(first, GREEDY)
        while not any(r.committed for r in table_of(both.prefill)):
            both.step(Role.PREFILL)
        (request,) = list(table_of(both.prefill))
        assert request.allocation is not None
        request.allocation.runs["full"][0].lease.release()
        b = both.submit(second, GREEDY)
        answers = both.run(a, b)
        for prompt, answer in zip((first, second), answers, strict=True):
            assert compare(oracle, prompt, answer.list).equal
        assert both.prefill.status().counters["stale_pages"] >= 1


def test_what_a_prompt_reads_in_a_page_that_was_given_away_says_nothing_of_the_device(model: Path) -> None:
    (prompt,) = prompts(43, 100)
    with pair(model, prefill={"chunk_tokens": 64}) as both:
        asked = both.submit(prompt, GREEDY)
        while not any(r.committed for r in table_of(both.prefill)):
            both.step(Role.PREFILL)
        (request,) = list(table_of(both.prefill))
        page = request.held.tables["full"].pages[0]
        manager_of(both.prefill).pools.gates["full"].layer(0)["k"][page].fill_(torch.nan)
        manager_of(both.prefill).pools.allocators["full"].epochs.bump([page])
        both.run(asked)
        counters = both.prefill.status().counters
        assert (counters["stale_pages"], counters["damage_logits"]) == (1, 0)


@pytest.mark.parametrize("way", ["given away", "preempted"])
def test_a_prompt_that_starts_over_in_its_middle_reports_the_score_of_each_token_once(model: Path, way: str) -> None:
    (prompt,) = prompts(45, 100)
    scored = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    with pair(model, prefill={"chunk_tokens": 64}) as both:
        (calm,) = both.run(both.submit(prompt, scored))
        assert calm.scores is not None
        assert len(calm.scores) == len(prompt) - 1
        again = both.submit(prompt, scored)
        while not any(r.committed for r in table_of(both.prefill)):
            both.step(Role.PREFILL)
        (request,) = list(table_of(both.prefill))
        assert 0 < request.committed < len(prompt)
        if way == "given away":
            own = request.held.tables["full"].pages[:1]
            manager_of(both.prefill).pools.allocators["full"].epochs.bump(own)
        else:
            assert scheduler_of(both.prefill).preempt_youngest()
        (answer,) = both.run(again)
        assert request.starts == 1
        assert (answer.scores, answer.list) == (calm.scores, calm.list)


def test_prefill_gives_up_what_is_stale_again_and_again(model: Path) -> None:
    (prompt,) = prompts(43, 40)
    with pair(model) as both:
        request = both.submit(prompt, GREEDY)
        take = pages_of(both.prefill).take

        def thief(r: PrefillRequest) -> bool:
            taken = take(r)
            assert r.allocation is not None
            manager_of(both.prefill).pools.allocators["full"].epochs.bump(r.allocation.tables["full"].pages[:1])
            return taken

        pages_of(both.prefill).take = thief  # type: ignore[method-assign, assignment]
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.WORKER
        assert "given away 3 times" in answer.done.message
        assert answer.tokens == {}


def test_a_tree_that_serves_a_page_it_no_longer_owns_is_not_believed(model: Path, oracle: Oracle) -> None:
    (prompt,) = prompts(44, 100)
    with pair(model) as both:
        both.run(both.submit(prompt, GREEDY))
        node = next(manager_of(both.prefill).tree.accounts.nodes())
        node.parts[Tier.DEVICE]["full"].lease.release()
        (answer,) = both.run(both.submit(prompt, GREEDY))
        assert compare(oracle, prompt, answer.list).equal
        assert both.prefill.status().counters["stale_pages"] == 1
        assert answer.progress[Role.PREFILL].cached_tokens == 0
