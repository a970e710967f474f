"""Several colocated workers and the real router core: one of them has a request, until it hands it on or is gone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.colocated_worker import colocated
from tests.support.stepped_cluster import Company, company, generated
from tests.support.worker_pair import SESSION
from tests.workers.test_migrations import prompts, seeded
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Audit, Submit
from twinpool.contracts.messages.worker_events import Audited, AuditEnd
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.state.worker_table import SEQUENCE_TOKENS

pytestmark = pytest.mark.slow
PAGE = 16


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[list[int]]:
    """What eight requests are answered by two pools, when nothing happens."""
    with company(model) as c:
        for number, prompt in enumerate(prompts(1, 8)):
            c.submit(prompt, seeded(number))
        return c.run()


@pytest.fixture
def running(model: Path) -> Iterator[tuple[Company, list[RequestId]]]:
    """The same eight, on two colocated workers, in the middle of their answers."""
    with company(model, colocated=2, cache={"page_tokens": PAGE}) as c:
        rids = [c.submit(prompt, seeded(number)) for number, prompt in enumerate(prompts(1, 8))]
        c.until(lambda: all(generated(c, rid, 6)() for rid in rids), "all to run")
        yield c, rids


def test_one_worker_gets_both_legs_of_a_request_and_its_load_counts_tokens_and_sequences(model: Path) -> None:
    with company(model, colocated=2) as c:
        (prompt,) = prompts(3, 1)
        rid = c.submit(prompt, seeded(0))
        submits = [(name, command) for name, command in c.sent if isinstance(command, Submit)]
        assert [(name, command.peer) for name, command in submits] == [("colocated-0", None)]
        entry = c.core.workers.named("colocated-0")
        assert entry is not None
        assert entry.load == len(prompt) + SEQUENCE_TOKENS
        c.until(generated(c, rid, 3), "it to run")
        assert entry.load == SEQUENCE_TOKENS
        c.run(rid)
        assert entry.load == 0
        assert c.told[rid].request.workers == dict.fromkeys((Role.PREFILL, Role.DECODE), "colocated-0")


def test_a_known_prefix_draws_a_request_to_its_worker_unless_that_is_busy(model: Path) -> None:
    with company(model, colocated=2) as c:
        rng = random.Random(1)
        prefix = [rng.randrange(300) for _ in range(256)]
        c.run(c.submit(prefix, seeded(0, 2)))
        again = c.submit([*prefix, 1], seeded(0, 8))
        assert c.worker_of(again) == "colocated-0"
        others = [c.submit([n, *prefix], seeded(0, 8)) for n in range(4)]
        assert {c.worker_of(rid) for rid in others[:1]} == {"colocated-1"}
        c.run()


def test_d1_a_drained_worker_hands_its_running_requests_on_and_no_stream_is_altered(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    mine = [rid for rid in rids if c.worker_of(rid) == "colocated-0"]
    assert len(mine) in range(2, 7)
    c.drain("colocated-0")
    c.until(lambda: c.decode("colocated-0").drained, "colocated-0 to be empty", 1_000_000)
    assert all(c.worker_of(rid) == "colocated-1" for rid in rids if c.told[rid].done is None)
    assert c.run(*rids) == undisturbed
    assert c.core.migrations.counts.migrated == len(mine)
    assert [c.told[rid].replays for rid in rids] == [[]] * 8, "nothing was computed again"


def test_d5_requests_of_a_worker_that_is_gone_start_over_elsewhere_from_their_tokens(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    mine = [rid for rid in rids if c.worker_of(rid) == "colocated-0"]
    c.gone("colocated-0")
    assert c.run(*rids) == undisturbed
    assert [len(c.told[rid].replays) for rid in rids] == [int(rid in mine) for rid in rids]


def test_a_source_that_is_gone_after_it_handed_a_request_on_costs_nothing(model: Path) -> None:
    with company(model, colocated=2) as c:
        (prompt,) = prompts(2, 1)
        rid = c.submit(prompt, seeded(1))
        c.until(generated(c, rid, 5), "it to run")
        c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: c.worker_of(rid) == "colocated-1", "it to migrate")
        c.gone("colocated-0")
        answer = c.run(rid)[0]
        assert c.told[rid].replays == []
    with company(model) as c:
        assert c.run(c.submit(prompt, seeded(1)))[0] == answer


def test_a_request_that_is_cancelled_is_cancelled_once_and_leaves_nothing(
    running: tuple[Company, list[RequestId]],
) -> None:
    c, rids = running
    for rid in rids:
        c.cancel(rid)
    assert sum(type(command).__name__ == "Cancel" for _, command in c.sent) == len(rids)


def test_a_prompt_that_waits_on_a_draining_worker_starts_over_elsewhere(model: Path) -> None:
    sections: dict[str, Any] = {"prefill": {"max_running": 1}}
    with company(model, colocated=2, **sections) as c:
        rids = [c.submit(prompt, seeded(number, 12)) for number, prompt in enumerate(prompts(4, 6))]
        c.drain("colocated-0")
        c.until(lambda: c.decode("colocated-0").drained, "colocated-0 to be empty", 1_000_000)
        c.run(*rids)


# ------------------------------------------------------------ audits


def test_an_idle_colocated_worker_computes_audits_and_a_request_preempts_them(model: Path) -> None:
    with colocated(model, audit={"chunk_tokens": 16}) as both:
        prompt = list(range(37))
        (answer,) = both.run(both.submit(prompt, SamplingParams(max_tokens=12, temperature=0.0)))
        tokens = (*prompt, *answer.list)
        audit = Audit(RequestId("audit-1"), 0, tokens, len(prompt), SamplingParams(max_tokens=12, temperature=0.0))
        both.settle()
        both.worker.handle(SESSION, audit)
        both.step()
        both.submit([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))
        found = [event for event in both.step() if isinstance(event, Audited)]
        assert [event.end for event in found] == [AuditEnd.PREEMPTED]
        both.run()
        both.settle()
        both.worker.handle(SESSION, audit)
        found = [event for _ in range(10) for event in both.step() if isinstance(event, Audited)]
        assert [(e.end, e.checked, e.differing, e.exact) for e in found] == [(AuditEnd.COMPUTED, 12, 0, True)]
