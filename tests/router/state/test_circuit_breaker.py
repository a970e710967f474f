"""Circuit breakers: who is left alone, for how long, and who isn't."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.stage import Stage
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ErrorKind, IllegalTransition
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.state.circuit_breaker import CIRCUIT, CircuitBreaker, CircuitEvent, CircuitState

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PATIENT: dict[str, Any] = {"replay_limit": 1000, "worker_wait_s": 1000.0, "breaker_failures": 4, "breaker_open_s": 5.0}


def state(stage: Stage, name: str) -> CircuitState:
    entry = stage.core.workers.named(name)
    assert entry is not None
    return entry.breaker.state


def accuse(stage: Stage, rid: RequestId, kind: ErrorKind, blame: str | None = None) -> None:
    """Decode reports that the hand-over failed, and that prefill is at fault (or `blame`)."""
    prefill, decode = stage.leg(rid, PREFILL), stage.leg(rid, DECODE)
    submit = stage.legs.pop((decode, rid)).submit
    stage.hear(stage.key(decode), Done(rid, submit.attempt, "error", None, kind, "bad", WorkerName(blame or prefill)))


def play_bad(stage: Stage, rid: RequestId, bad: str, kind: ErrorKind = ErrorKind.DAMAGED) -> None:
    """Every attempt that `bad` has a part in fails, and prefill is blamed; the first other one is answered."""
    for _ in range(100):
        if rid in stage.ends:
            return
        if not any(r == rid for _, r in stage.legs):
            stage.tick(0.5)
        elif bad in (stage.leg(rid, PREFILL), stage.leg(rid, DECODE)):
            accuse(stage, rid, kind)
        else:
            while rid not in stage.ends:
                name = next(n for n, r in stage.legs if r == rid and stage.can_say(n, r))
                stage.say_next(name, rid)
    raise AssertionError("no end")


def test_a_prefill_worker_that_sends_damage_is_left_alone_and_the_decode_workers_that_say_so_are_not() -> None:
    stage = Stage(**PATIENT)
    for _ in range(12):
        rid = stage.submit()
        play_bad(stage, rid, "prefill-0")
        stage.assert_answered(rid)
    assert state(stage, "prefill-0") is CircuitState.OPEN
    for healthy in ("prefill-1", "decode-0", "decode-1"):
        assert state(stage, healthy) is CircuitState.CLOSED
    before = len(stage.submits)
    for _ in range(6):
        stage.submit()
    assert "prefill-0" not in {worker[0] for worker, _ in stage.submits[before:]}


def test_a_decode_worker_that_complains_about_everybody_is_the_one_at_fault() -> None:
    stage = Stage(prefill=3, **PATIENT)
    for _ in range(12):
        rid = stage.submit()
        play_bad(stage, rid, "decode-0", ErrorKind.ROOM)
    assert state(stage, "decode-0") is CircuitState.OPEN
    assert {state(stage, name) for name in ("prefill-0", "prefill-1", "prefill-2", "decode-1")} == {CircuitState.CLOSED}


def test_the_only_reporter_of_the_only_prefill_worker_is_believed() -> None:
    stage = Stage(prefill=1, decode=1, **PATIENT)
    rid = stage.submit()
    for _ in range(40):
        if state(stage, "prefill-0") is CircuitState.OPEN:
            break
        if any(r == rid for _, r in stage.legs):
            accuse(stage, rid, ErrorKind.ROOM)
        else:
            stage.tick(0.5)
    assert state(stage, "prefill-0") is CircuitState.OPEN
    assert state(stage, "decode-0") is CircuitState.CLOSED
    stage.finish()
    stage.assert_answered(rid)
    assert state(stage, "prefill-0") is CircuitState.CLOSED, "the request that waited for it was the trial"


def opened(decode: int = 1) -> Stage:
    """A cluster of which every decode worker's breaker has opened just now."""
    stage = Stage(prefill=1, decode=decode, **PATIENT)
    rids = [stage.submit() for _ in range(4 * decode)]
    for rid in rids:
        stage.error(rid, DECODE, ErrorKind.WORKER)
    while stage.legs:
        stage.error(next(iter(stage.legs))[1], DECODE, ErrorKind.WORKER)
    for number in range(decode):
        assert state(stage, f"decode-{number}") is CircuitState.OPEN
    return stage


def test_after_a_while_one_request_tries_it_and_its_success_brings_the_others() -> None:
    stage = opened()
    stage.tick(4.0)
    assert not stage.legs, "not before its time"
    stage.tick(1.2)
    assert len(stage.legs) == 2, "one request, on both workers"
    assert state(stage, "decode-0") is CircuitState.HALF_OPEN
    rid = next(iter(stage.legs))[1]
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 2)
    assert state(stage, "decode-0") is CircuitState.CLOSED
    stage.tick()
    stage.finish()


def test_a_trial_that_fails_is_followed_by_a_longer_wait_unless_the_worker_is_needed() -> None:
    breaker = CircuitBreaker(RouterConfig(breaker_failures=1, breaker_open_s=5.0))
    now = 100.0
    breaker.failed(RequestId("first"), now)
    for wait in (5.0, 10.0, 20.0, 40.0, 40.0):
        assert not breaker.admits(now + 4.9, needed=True)
        assert breaker.admits(now + 5.0, needed=True)
        assert not breaker.admits(now + wait - 0.1)
        now += wait
        assert breaker.admits(now)
        breaker.sent(RequestId("trial"))
        breaker.failed(RequestId("trial"), now)


def test_failures_from_before_a_trial_that_succeeds_count_no_more() -> None:
    breaker = CircuitBreaker(RouterConfig(breaker_failures=2, breaker_window_s=30.0, breaker_open_s=5.0))
    for name in ("first", "second"):
        breaker.failed(RequestId(name), 100.0)
    assert breaker.admits(105.0)
    breaker.sent(RequestId("trial"))
    breaker.succeeded(RequestId("trial"), 106.0)
    states = []
    for name in ("next", "the one after"):
        breaker.failed(RequestId(name), 107.0)
        states.append(breaker.state)
    assert states == [CircuitState.CLOSED, CircuitState.OPEN], "two failures open it, as at first"


def test_only_the_trial_itself_says_how_it_went_and_after_it_all_is_as_at_first() -> None:
    """Requests from before run on meanwhile, and what they say is of before."""
    breaker = CircuitBreaker(RouterConfig(breaker_failures=1, breaker_open_s=5.0))
    breaker.sent(RequestId("from before"))
    breaker.failed(RequestId("first"), 100.0)
    breaker.sent(RequestId("trial"))
    breaker.failed(RequestId("trial"), 105.0)
    assert not breaker.admits(114.9), "it waits twice as long by now"
    assert breaker.admits(115.0)
    breaker.sent(RequestId("trial"))
    assert breaker.state is CircuitState.HALF_OPEN
    assert not breaker.admits(115.0), "one at a time"
    breaker.succeeded(RequestId("from before"), 115.0)
    assert (breaker.state, breaker.probe) == (CircuitState.HALF_OPEN, "trial")
    breaker.failed(RequestId("from before"), 115.0)
    breaker.complained("a peer", 115.0)
    breaker.left(RequestId("from before"))
    assert (breaker.state, breaker.probe, breaker.opened) == (CircuitState.HALF_OPEN, "trial", 2)
    breaker.succeeded(RequestId("trial"), 116.0)
    assert (breaker.state, breaker.probe) == (CircuitState.CLOSED, None)
    breaker.failed(RequestId("next"), 117.0)
    assert not breaker.admits(121.9)
    assert breaker.admits(122.0), "as long as the first time, and no longer"
    breaker.sent(RequestId("trial"))
    breaker.left(RequestId("trial"))
    assert breaker.admits(122.0), "its client has left: the next one is the trial"
    breaker.over()
    breaker.over()
    breaker.left(RequestId("trial"))
    assert not breaker.admits(1e9, needed=True)


def test_complaints_about_one_who_died_are_no_longer_held_against_who_made_them() -> None:
    config = RouterConfig(breaker_failures=3, breaker_rate=0.5)
    for justified in ("", "first", "second", "nobody"):
        breaker = CircuitBreaker(config)
        breaker.complained("first", 100.0)
        breaker.complained("second", 100.0)
        breaker.justified(justified)
        breaker.complained("third", 100.0)
        assert (breaker.state is CircuitState.OPEN) is (justified in ("", "nobody")), justified


def test_complaints_that_are_not_held_against_a_worker_are_no_successes_of_it() -> None:
    breaker = CircuitBreaker(RouterConfig(breaker_failures=3, breaker_rate=0.5))
    for _ in range(9):
        breaker.complained("the one prefill worker", 100.0)
    for name in ("a", "b", "c"):
        assert breaker.state is CircuitState.CLOSED
        breaker.failed(RequestId(name), 100.0)
    assert breaker.state is CircuitState.OPEN


@pytest.mark.parametrize("decode", [1, 2])
def test_workers_without_a_colleague_that_serves_are_tried_as_often_as_at_first(decode: int) -> None:
    stage = opened(decode)
    for _ in range(5):
        stage.tick(4.0)
        assert not stage.legs
        stage.tick(1.2)
        for number in range(decode):
            assert state(stage, f"decode-{number}") is CircuitState.HALF_OPEN
        for rid in {rid for _, rid in stage.legs}:
            stage.error(rid, DECODE, ErrorKind.WORKER)


def test_a_worker_left_alone_for_long_is_tried_at_once_when_its_colleague_drains() -> None:
    stage = opened(2)
    stage.tick(5.2)
    bad = min({rid for _, rid in stage.legs}, key=lambda rid: stage.leg(rid, DECODE))
    stage.error(bad, DECODE, ErrorKind.WORKER)
    stage.finish()
    stage.tick(5.2)
    stage.finish()
    assert state(stage, "decode-0") is CircuitState.OPEN, "the other one serves, so the wait is 10 s"
    stage.drain("decode-1")
    stage.submit()
    assert state(stage, "decode-0") is CircuitState.HALF_OPEN


def test_a_trial_that_its_client_takes_back_makes_room_for_the_next() -> None:
    stage = opened()
    stage.tick(5.2)
    first = next(iter(stage.legs))[1]
    stage.core.cancel(first)
    stage.play()
    stage.tick()
    second = {rid for _, rid in stage.legs}
    assert len(second) == 1
    assert second != {first}
    assert state(stage, "decode-0") is CircuitState.HALF_OPEN


def test_a_link_that_breaks_is_one_failure_however_many_requests_it_strikes() -> None:
    stage = Stage(prefill=1, decode=1, **PATIENT)
    rids = [stage.submit() for _ in range(10)]
    stage.unlink("decode-0")
    assert state(stage, "decode-0") is CircuitState.CLOSED
    stage.link("decode-0")
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)


def test_a_worker_that_died_justifies_those_who_complained_about_it() -> None:
    stage = Stage(prefill=2, decode=1, **PATIENT)
    for victim in ("prefill-0", "prefill-1"):
        for _ in range(4):
            rid = stage.submit()
            for _ in range(50):
                if not any(r == rid for _, r in stage.legs):
                    stage.tick(0.5)
                elif stage.leg(rid, PREFILL) == victim:
                    accuse(stage, rid, ErrorKind.ROOM)
                    break
                else:
                    play_bad(stage, rid, victim, ErrorKind.ROOM)
                    break
        stage.kill(victim)
        stage.restart(victim)
    assert state(stage, "decode-0") is CircuitState.CLOSED


def test_breakers_say_nothing_about_refusals_of_a_draining_worker() -> None:
    stage = Stage(prefill=1, decode=2, **PATIENT)
    for _ in range(8):
        stage.tick(1.0)
        stage.error(stage.submit(), DECODE, ErrorKind.DRAINING)
    assert {state(stage, name) for name in ("decode-0", "decode-1", "prefill-0")} == {CircuitState.CLOSED}


def test_an_attempt_after_a_failed_hand_over_prefers_another_pair() -> None:
    stage = Stage(prefill=1, decode=3, **PATIENT)
    rid = stage.submit()
    seen = []
    for _ in range(3):
        while not any(r == rid for _, r in stage.legs):
            stage.tick(0.3)
        seen.append(stage.leg(rid, DECODE))
        accuse(stage, rid, ErrorKind.ROOM)
    assert len(set(seen)) == 3


def test_an_event_that_is_not_in_the_table_raises_and_every_state_can_end() -> None:
    assert CIRCUIT.dead_ends() == []
    for state_, event in ((CircuitState.CLOSED, CircuitEvent.PROVED), (CircuitState.OPEN, CircuitEvent.TRIP)):
        with pytest.raises(IllegalTransition):
            CIRCUIT.next(state_, event)
    for row in CIRCUIT.rows.values():
        assert row[CircuitEvent.OVER] is CircuitState.OVER


def test_who_waits_in_vain_for_a_worker_that_is_left_alone_is_told() -> None:
    stage = Stage(prefill=1, decode=1, **{**PATIENT, "worker_wait_s": 3.0})
    rids = [stage.submit() for _ in range(4)]
    for rid in rids:
        stage.error(rid, DECODE, ErrorKind.WORKER)
    stage.tick(3.1)
    for rid in rids:
        assert "left alone after failures: decode-0" in stage.ends[rid].message


@pytest.mark.parametrize(("later", "opens"), [(0.0, True), (0.001, False)])
def test_an_outcome_counts_until_the_window_is_over(later: float, opens: bool) -> None:
    config = RouterConfig(breaker_failures=2, breaker_window_s=30.0)
    breaker = CircuitBreaker(config)
    breaker.failed(RequestId("first"), 100.0)
    breaker.failed(RequestId("second"), 130.0 + later)
    assert (breaker.state is CircuitState.OPEN) is opens


@pytest.mark.parametrize(("good", "opens"), [(2, True), (3, False)])
def test_enough_failures_open_it_only_if_they_are_enough_of_all_outcomes(good: int, opens: bool) -> None:
    breaker = CircuitBreaker(RouterConfig(breaker_failures=3, breaker_rate=0.6))
    for number in range(good):
        breaker.succeeded(RequestId(f"good-{number}"), 0.0)
    for number in range(3):
        breaker.failed(RequestId(f"bad-{number}"), 0.0)
    assert (breaker.state is CircuitState.OPEN) is opens


def test_failures_below_the_least_count_open_nothing_however_many_they_are_of_all() -> None:
    breaker = CircuitBreaker(RouterConfig(breaker_failures=3, breaker_rate=0.6))
    for number in range(2):
        breaker.failed(RequestId(f"bad-{number}"), 0.0)
    assert breaker.state is CircuitState.CLOSED
