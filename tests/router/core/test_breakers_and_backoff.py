"""What the router core tells its workers' breakers, and how long it waits before the next attempt."""

from __future__ import annotations

import pytest

from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.state.circuit_breaker import CircuitBreaker, CircuitState


def breaker(stage: Stage, name: str) -> CircuitBreaker:
    entry = stage.core.workers.named(name)
    assert entry is not None
    return entry.breaker


def test_a_stream_that_broke_is_one_failure_however_many_requests_it_struck() -> None:
    stage = Stage(1, 2, breaker_failures=3, replay_limit=100)
    for _ in range(2):
        for _ in range(6):
            stage.submit()
        stage.unlink("decode-0")
        assert breaker(stage, "decode-0").state is CircuitState.CLOSED, "two failures are fewer than three"
        stage.link("decode-0")
    for _ in range(6):
        stage.submit()
    stage.unlink("decode-0")
    assert breaker(stage, "decode-0").state is CircuitState.OPEN, "the third is enough"


def test_d5_what_a_worker_calls_cancelled_and_nobody_cancelled_is_tried_again_and_counts_against_nobody() -> None:
    """Prefill lost its connection, and told decode; this router hears of the loss last."""
    stage = Stage(1, 1, breaker_failures=2, breaker_rate=0.1, replay_limit=100)
    rids = [stage.submit() for _ in range(6)]
    for rid in rids:
        submit = stage.legs.pop(("decode-0", rid)).submit
        lost = Done(
            rid, submit.attempt, "error", None, ErrorKind.CANCELLED, "its router is gone", WorkerName("prefill-0")
        )
        stage.hear(stage.key("decode-0"), lost)
        assert rid not in stage.ends
    for name in ("prefill-0", "decode-0"):
        assert breaker(stage, name).state is CircuitState.CLOSED
    while any(rid not in stage.ends for rid in rids):
        stage.tick(0.5)
        stage.finish()
    for rid in rids:
        stage.assert_answered(rid)


def test_the_breaker_of_an_incarnation_that_is_gone_is_over_and_complaints_about_it_are_justified() -> None:
    stage = Stage(2, 1, breaker_failures=2, breaker_rate=0.1, replay_limit=100)
    old = breaker(stage, "prefill-0")
    for victim in ("prefill-0", "prefill-1"):
        rid = next(r for r in (stage.submit() for _ in range(4)) if stage.leg(r, Role.PREFILL) == victim)
        decode = stage.leg(rid, Role.DECODE)
        submit = stage.legs.pop((decode, rid)).submit
        done = Done(rid, submit.attempt, "error", None, ErrorKind.ROOM, "bad", WorkerName(victim))
        stage.hear(stage.key(decode), done)
        if victim == "prefill-0":
            stage.kill(victim)
            stage.restart(victim)
            assert old.state is CircuitState.OVER
            assert breaker(stage, victim).state is CircuitState.CLOSED
    assert breaker(stage, "decode-0").state is CircuitState.CLOSED, "it was right about the one that died"


def test_the_first_token_of_a_trial_request_closes_the_breaker_again() -> None:
    stage = Stage(1, 1, breaker_failures=2, breaker_open_s=5.0, replay_limit=100, worker_wait_s=1000.0)
    rid = stage.submit(max_tokens=6)
    for _ in range(2):
        stage.say(rid, Role.PREFILL, 2)
        stage.error(rid, Role.DECODE, ErrorKind.WORKER)
        while not any(r == rid for _, r in stage.legs) and breaker(stage, "decode-0").state is CircuitState.CLOSED:
            stage.tick(0.5)
    assert breaker(stage, "decode-0").state is CircuitState.OPEN
    stage.clock.advance(5.0)
    stage.tick()
    assert breaker(stage, "decode-0").state is CircuitState.HALF_OPEN
    stage.finish()
    assert breaker(stage, "decode-0").state is CircuitState.CLOSED
    stage.assert_answered(rid)


def test_a_trial_whose_stream_breaks_has_failed_also_beside_a_request_of_before() -> None:
    stage = Stage(1, 1, breaker_failures=2, breaker_rate=0.1, breaker_open_s=5.0, replay_limit=100, worker_wait_s=1e3)
    before = stage.submit(max_tokens=50)
    rid = stage.submit()
    while breaker(stage, "decode-0").state is CircuitState.CLOSED:
        if ("decode-0", rid) in stage.legs:
            stage.error(rid, Role.DECODE, ErrorKind.WORKER)
        stage.tick(0.5)
    stage.tick(5.0)
    assert breaker(stage, "decode-0").probe == rid
    assert stage.leg(before, Role.DECODE) == "decode-0"
    stage.unlink("decode-0")
    assert (breaker(stage, "decode-0").state, breaker(stage, "decode-0").opened) == (CircuitState.OPEN, 2)


@pytest.mark.parametrize(("replays", "pause"), [(1, 0.0), (2, 0.05), (3, 0.1), (6, 0.8), (7, 1.0), (12, 1.0)])
def test_the_next_attempt_waits_longer_after_each_one_and_never_over_a_second(replays: int, pause: float) -> None:
    stage = Stage(1, 1, replay_limit=100, breaker_failures=1000)
    rid = stage.submit(max_tokens=6)
    request = stage.requests[rid]
    for _ in range(replays):
        while not any(r == rid for _, r in stage.legs):
            stage.tick(0.01)
        stage.error(rid, Role.PREFILL, ErrorKind.WORKER)
    assert request.replays == replays
    waited = request.not_before - request.waiting_since
    assert waited == pytest.approx(pause)
