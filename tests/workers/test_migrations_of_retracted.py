"""Requests that are retracted where others are handed on, and what the router's books say of moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stepped_cluster import Company, company, generated, hears
from tests.support.worker_pair import SESSION
from tests.support.worker_parts import scheduler_of, table_of
from tests.workers.test_migrations import prompts, seeded
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef, PushPrefix
from twinpool.contracts.messages.worker_events import MigrationWanted, PushReady
from twinpool.decode.request import DecodePhase, DecodeRequest
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.state.routed_request import AttemptLeg

COPY = {"retract": "copy", "cache": {"host_bytes": 1 << 23}}


def running(c: Company, count: int) -> list[RequestId]:
    """So many requests in the middle of their answers, all on decode-0."""
    rids = [c.submit(prompt, seeded(number)) for number, prompt in enumerate(prompts(3, count))]
    c.until(lambda: all(generated(c, rid, 6)() for rid in rids), "all to run")
    return rids


def on_worker(c: Company, rid: RequestId) -> DecodeRequest:
    (request,) = [r for r in table_of(c.decode("decode-0")) if r.submit.request_id == rid]
    return request


@pytest.mark.slow
def test_d1_who_is_retracted_at_a_draining_worker_comes_back_and_is_handed_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with company(model, decodes=1, decode=COPY) as c:
        undisturbed = c.run(*running(c, 4))
    with company(model, decodes=1, decode=COPY, router={"concurrent_migrations": 1}) as c:
        rids, told = running(c, 4), hears(c, MigrationWanted)
        worker = c.decode("decode-0")
        c.start(Role.DECODE, WorkerName("decode-1"))
        before, after = on_worker(c, rids[0]), on_worker(c, rids[3])
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_of(worker).pressure, "has_room_for", lambda request: False)
            scheduler_of(worker).retract(before, on_purpose=True)
            c.drain("decode-0")
            c.step()
            assert {e.request_id for e in told} == set(rids[1:]), "what is off the device can't be handed on yet"
            assert after.phase is DecodePhase.RUNNING
            scheduler_of(worker).retract(after, on_purpose=True)
            c.step()
            assert {before.phase, after.phase} == {DecodePhase.RETRACTED}
            assert not worker.drained
        c.until(lambda: worker.drained, "decode-0 to be empty", 1_000_000)
        assert [e.request_id for e in told if isinstance(e, MigrationWanted) and e.withdrawn] == [rids[3]]
        assert c.run(*rids) == undisturbed
        assert c.core.migrations.counts.migrated == 4, "nothing of any of them was computed again"
        assert c.core.counts.replays == c.core.migrations.counts.restarted == 0


def test_a9_of_a_request_that_is_coming_back_nothing_is_given_away(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with company(model, decodes=1, decode=COPY) as c:
        (rid,) = running(c, 1)
        worker, request = c.decode("decode-0"), on_worker(c, rid)
        peer = PeerRef(WorkerName("decode-9"), c.key("decode-0")[1], "tcp://127.0.0.1:1")
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_of(worker).retraction, "returned", lambda: ([], []))
            scheduler_of(worker).retract(request, on_purpose=True)
            c.until(lambda: request.phase is DecodePhase.RESUMING, "it to come back")
            shared: list[DecodeRequest] = []
            patch.setattr(worker._request_pages, "cache", shared.append)
            worker.handle(SESSION, PushPrefix(rid, request.submit.attempt, RoomId("ahead"), peer))
            answers = [e for _, e in worker.step() if isinstance(e, PushReady)]
        assert [e.positions for e in answers] == [0]
        assert not shared, "its pages hold nothing yet"
        c.run(rid)


def test_after_a_migration_the_table_says_who_drew_each_token(model: Path) -> None:
    with company(model) as c:
        rid = c.submit(prompts(3, 1)[0], seeded(1))
        c.until(generated(c, rid, 6), "it to run")
        request = c.told[rid].request
        source = c.worker_of(rid)
        assert c.core.migrations.begin(request)
        c.act()
        c.until(lambda: c.core.migrations.counts.migrated == 1, "it to move")
        c.run(rid)
        first, second = request.legs
        assert isinstance(second, AttemptLeg)
        assert (first.workers[Role.DECODE], second.workers[Role.DECODE]) == (
            source,
            "decode-1" if source == "decode-0" else "decode-0",
        )
        assert second.base >= first.base + 6
        assert second.role_at(second.base) is Role.DECODE, "it has the state from a decode worker and draws at once"


def circuit(c: Company) -> CircuitState:
    """Whether the router trusts decode-1."""
    entry = c.core.workers.named("decode-1")
    assert entry is not None
    return entry.breaker.state


def test_a_worker_that_was_left_alone_is_tried_with_one_migration(model: Path) -> None:
    clock = ManualClock()
    with company(model, decodes=1, clock=clock) as c:
        one, two = running(c, 2)
        c.start(Role.DECODE, WorkerName("decode-1"))
        entry = c.core.workers.named("decode-1")
        assert entry is not None
        for number in range(c.config.router.breaker_failures):
            entry.breaker.failed(RequestId(f"f{number}"), clock.now())
        assert circuit(c) is CircuitState.OPEN
        assert not c.core.migrations.begin(c.told[one].request)
        clock.advance(c.config.router.breaker_open_s)
        assert c.core.migrations.begin(c.told[one].request)
        assert not c.core.migrations.begin(c.told[two].request), "one at a time, until it has proved itself"
        c.act()
        c.until(lambda: c.core.migrations.counts.migrated == 1, "it to move")
        assert circuit(c) is CircuitState.CLOSED
        assert c.core.migrations.begin(c.told[two].request)
        c.act()
        c.run(one, two)
