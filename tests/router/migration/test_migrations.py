"""Moves as the router core drives them, without workers: who is told what when one succeeds, fails or is overtaken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.router_commands import Command, PauseForMigration, PullPrefix, ResumeHere
from twinpool.contracts.messages.worker_events import (
    Done,
    MigrationDone,
    MigrationPaused,
    MigrationUndone,
    MigrationWanted,
    PushReady,
)
from twinpool.router.migration.migration_table import AVOID_S, MigrationState
from twinpool.router.migration.migrations import PATIENCE_S
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.state.ttft_prediction import TenantWeight
from twinpool.router.state.worker_table import WorkerKey

PREFILL, DECODE = Role.PREFILL, Role.DECODE
STATES = [MigrationState.AHEAD, MigrationState.ASKED, MigrationState.OFFERED, MigrationState.GIVEN]
SOURCE, TARGET = "decode-0", "decode-1"


class Scene:
    """A request that decode-0 has, and that begins to move to decode-1 as its next attempt."""

    def __init__(self, scores: bool = False, **config: Any) -> None:
        self.on = Stage(1, 2, **config)
        self.rid = self.on.submit(seed=9, prompt_logprobs=0 if scores else None)
        self.on.say(self.rid, PREFILL, 2 + scores)
        self.on.say(self.rid, DECODE, 1 + 2)
        self.request = self.on.requests[self.rid]
        assert self.request.decode == self.source
        assert self.begin()

    @property
    def source(self) -> WorkerKey:
        return self.on.key(SOURCE)

    @property
    def target(self) -> WorkerKey:
        return self.on.key(TARGET)

    @property
    def state(self) -> MigrationState | None:
        move = self.on.core.migrations.of(self.request)
        return move.state if move is not None else None

    def begin(self) -> bool:
        begun = self.on.core.migrations.begin(self.request)
        self.on.play()
        return begun

    def pauses(self) -> None:
        """The source has stopped: of all that was told it holds the state, but for the last token's."""
        self.on.hear(self.source, MigrationPaused(self.rid, 0, self.request.next_position - 1))

    def bring_to(self, state: MigrationState) -> None:
        steps: list[Callable[[], None]] = [
            lambda: self.on.hear(self.source, PushReady(self.rid, 0, 0)),
            self.pauses,
            lambda: self.on.hear(self.source, MigrationDone(self.rid, 0, 1000)),
        ]
        for step in steps[: STATES.index(state)]:
            step()
        assert self.state is state

    def target_ends(self, kind: ErrorKind, **done: Any) -> None:
        self.on.legs.pop((TARGET, self.rid))
        self.on.hear(self.target, Done(self.rid, 1, "error", error=kind, message="planted", **done))

    def orders_from(self, first: int) -> list[tuple[str, Command]]:
        return [(worker[0], order) for worker, order in self.on.orders[first:]]

    def cancelled(self) -> set[tuple[str, int]]:
        """At decode workers, and as which attempt."""
        return {(worker[0], cancel.attempt) for worker, cancel in self.on.cancels if worker[0].startswith(DECODE)}

    def breaker(self, name: str) -> CircuitState:
        entry = self.on.core.workers.named(name)
        assert entry is not None
        return entry.breaker.state


@pytest.mark.parametrize("state", [MigrationState.OFFERED, MigrationState.GIVEN])
def test_whoever_speaks_first_after_the_pause_has_the_request(state: MigrationState) -> None:
    scene = Scene()
    scene.bring_to(state)
    scene.on.rooms_in.add(scene.on.legs[TARGET, scene.rid].submit.room)
    scene.on.say_next(TARGET, scene.rid)
    assert (scene.request.decode, scene.request.attempt) == (scene.target, 1)
    scene.on.legs.pop((SOURCE, scene.rid))
    scene.on.finish()
    scene.on.assert_answered(scene.rid)
    assert scene.on.core.migrations.counts.migrated == 1
    assert (scene.request.migrations, scene.request.attempts) == (1, 1)
    assert not scene.cancelled()


def test_a_wish_is_over_when_the_request_has_migrated() -> None:
    """What is counted as waiting is what `drain` reports: it may not grow again with requests that are elsewhere."""
    scene = Scene()
    migrations = scene.on.core.migrations
    scene.on.hear(scene.source, MigrationWanted(scene.rid, 0, started=True))
    scene.bring_to(MigrationState.GIVEN)
    assert migrations.waiting(scene.source) == 0, "it is under way"
    scene.on.rooms_in.add(scene.on.legs[TARGET, scene.rid].submit.room)
    scene.on.say_next(TARGET, scene.rid)
    assert scene.request.decode == scene.target
    assert migrations.waiting(scene.source) == 0, "and now it is over"


def test_a_request_that_has_started_since_it_was_to_leave_migrates_and_is_not_begun_anew() -> None:
    on = Stage(1, 2)
    on.kill(TARGET)
    rid = on.submit(seed=9)
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 1 + 2)
    migrations, source = on.core.migrations, on.key(SOURCE)
    for started in (False, True):
        on.hear(source, MigrationWanted(rid, 0, started=started))
        assert migrations.waiting(source) == 1, "nobody else can take it"
    on.restart(TARGET)
    on.tick()
    assert (migrations.counts.begun, migrations.counts.restarted) == (1, 0)
    assert on.requests[rid].attempt == 0


def test_the_target_is_sent_what_the_source_has_and_the_time_that_is_left_and_not_asked_for_scores_again() -> None:
    scene = Scene(scores=True, request_timeout_s=30.0)
    scene.on.tick(10.0)
    first = scene.on.submits[0][1]
    scene.request.share = TenantWeight("acme", 3)
    scene.bring_to(MigrationState.OFFERED)
    worker, submit = scene.on.submits[-1]
    assert (worker, submit.attempt, submit.migrating) == (scene.target, 1, True)
    assert (submit.tenant, submit.weight) == ("acme", 3)
    assert submit.peer is not None
    assert submit.peer.name == SOURCE
    assert submit.room != first.room
    answer = scene.on.answer(scene.rid)
    assert (submit.tokens, submit.prompt_len) == ((5, 6, 7, *answer[:2]), 3), "all that was told but its last token"
    assert submit.sampling == replace(first.sampling, prompt_logprobs=None)
    assert submit.deadline_s == pytest.approx(20.0)


def test_how_long_streams_stood_still_is_counted_from_pause_to_first_word() -> None:
    scene = Scene()
    for attempt, (pause, longest, both) in enumerate([(2.0, 2.0, 2.0), (3.0, 3.0, 5.0)], 1):
        source, target = scene.request.decode, scene.on.key(TARGET if attempt == 1 else SOURCE)
        assert source is not None
        scene.on.hear(source, PushReady(scene.rid, attempt - 1, 0))
        scene.on.clock.advance(1.0)
        scene.on.legs.pop((source[0], scene.rid))
        scene.on.hear(source, MigrationPaused(scene.rid, attempt - 1, scene.request.next_position - 1))
        scene.on.clock.advance(pause)
        scene.on.say_next(target[0], scene.rid)
        counts = scene.on.core.migrations.counts
        assert (counts.migrated, counts.longest_pause_s, counts.paused_s) == (attempt, longest, both)
        scene.on.say_next(target[0], scene.rid)
        assert attempt == 2 or scene.begin()


@pytest.mark.parametrize("state", STATES)
def test_a_request_taken_back_in_the_middle_of_a_migration_is_taken_back_from_whoever_was_sent_it(
    state: MigrationState,
) -> None:
    scene = Scene()
    scene.bring_to(state)
    scene.on.core.cancel(scene.rid)
    scene.on.play()
    sent_it = {(SOURCE, 0)} | ({(TARGET, 1)} if state in (MigrationState.OFFERED, MigrationState.GIVEN) else set())
    assert scene.cancelled() == sent_it


def test_a_target_that_refused_is_told_nothing_more_and_the_source_goes_on() -> None:
    scene = Scene()
    scene.bring_to(MigrationState.OFFERED)
    before = len(scene.on.orders)
    scene.target_ends(ErrorKind.OVERLOADED)
    assert scene.orders_from(before) == [(SOURCE, ResumeHere(scene.rid, 0))]
    assert not scene.cancelled()
    scene.on.finish()
    scene.on.assert_answered(scene.rid)
    assert scene.on.core.migrations.counts.stayed == 1


@pytest.mark.parametrize("state", STATES)
def test_a_source_that_takes_its_request_back_is_told_nothing_and_its_target_is_cancelled_if_it_was_asked(
    state: MigrationState,
) -> None:
    scene = Scene()
    scene.bring_to(state)
    before, target = len(scene.on.orders), scene.on.core.workers.named(TARGET)
    assert target is not None
    for _ in range(2):  # The second comes late: of a migration that is over.
        scene.on.hear(scene.source, MigrationUndone(scene.rid, 0, "planted"))
        assert scene.orders_from(before) == []
    if state is MigrationState.GIVEN:
        assert scene.state is state, "it said that it has given all of it away"
        return
    assert (scene.state, target.load, scene.request.decode) == (None, 0, scene.source)
    assert scene.cancelled() == ({(TARGET, 1)} if state is MigrationState.OFFERED else set())
    assert scene.on.core.migrations.counts.stayed == 1
    assert scene.on.core.check() == []
    scene.on.legs.pop((TARGET, scene.rid), None)
    scene.on.finish()
    scene.on.assert_answered(scene.rid)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("lost", [SOURCE, TARGET])
def test_a_migration_that_loses_a_side_half_way_is_over_and_the_next_one_arrives(
    state: MigrationState, lost: str
) -> None:
    """Each books at another time: what a side had of it is given back whoever dies when, and the answer is whole."""
    scene = Scene()
    scene.bring_to(state)
    scene.on.kill(lost)
    assert scene.state is None
    assert scene.on.core.check() == []
    replayed = lost == SOURCE or state is MigrationState.GIVEN
    assert (scene.request.attempt > 1) is replayed
    scene.on.restart(lost)
    scene.on.finish()
    scene.on.assert_answered(scene.rid)
    loads = [entry.load for entry in scene.on.core.workers]
    assert loads == [0, 0, 0], "and nobody has anything booked"


def test_a_target_that_failed_is_not_the_next_one_for_a_while_and_then_again() -> None:
    scene = Scene()
    scene.on.hear(scene.source, MigrationWanted(scene.rid, 0, started=True))
    scene.bring_to(MigrationState.OFFERED)
    begun = scene.on.core.migrations.counts.begun
    scene.target_ends(ErrorKind.OVERLOADED)
    scene.on.tick()
    assert scene.on.core.migrations.counts.begun == begun, "the only other worker has just refused it"
    scene.on.tick(AVOID_S)
    assert scene.on.core.migrations.counts.begun == begun + 1
    assert scene.request.last_attempt == 2, "as an attempt that the target has not seen"
    scene.on.hear(scene.source, MigrationUndone(scene.rid, 0, "planted"))
    scene.on.tick(AVOID_S)
    assert scene.on.core.migrations.counts.begun == begun + 1, "twice as long after the second refusal"
    scene.on.hear(scene.source, MigrationWanted(scene.rid, 0, started=True, withdrawn=True))
    scene.on.tick(4 * AVOID_S)
    assert scene.on.core.migrations.counts.begun == begun + 1, "the wish was taken back"


def test_a_request_does_not_migrate_to_a_worker_that_has_just_failed_it() -> None:
    on = Stage(1, 2)
    rid = on.submit(seed=9)
    on.say(rid, PREFILL, 2)
    on.error(rid, DECODE, ErrorKind.WORKER)
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 1 + 1)
    assert not on.core.migrations.begin(on.requests[rid])
    on.tick(1.0)
    assert on.core.migrations.begin(on.requests[rid])


def test_a_target_that_nobody_heard_of_in_time_is_cancelled_and_the_source_goes_on() -> None:
    scene = Scene()
    scene.bring_to(MigrationState.OFFERED)
    before = len(scene.on.orders)
    scene.on.tick(PATIENCE_S - 0.1)
    assert scene.state is MigrationState.OFFERED
    scene.on.tick(0.2)
    assert scene.orders_from(before) == [(SOURCE, ResumeHere(scene.rid, 0))]
    assert scene.cancelled() == {(TARGET, 1)}
    scene.on.finish()
    scene.on.assert_answered(scene.rid)


def test_a_copy_has_its_own_time_however_long_its_source_took_to_make_it_ready() -> None:
    scene = Scene()
    scene.on.tick(PATIENCE_S - 0.1)
    scene.on.hear(scene.source, PushReady(scene.rid, 0, 4))
    scene.on.tick(PATIENCE_S - 0.1)
    assert scene.state is MigrationState.AHEAD
    scene.on.tick(0.2)
    assert scene.on.core.migrations.of(scene.request) is None
    scene.on.finish()
    scene.on.assert_answered(scene.rid)


@pytest.mark.parametrize(
    ("kind", "blame", "left_alone"),
    [
        (ErrorKind.DAMAGED, SOURCE, {SOURCE}),
        (ErrorKind.DAMAGED, "", {TARGET}),
        (ErrorKind.DAMAGED, TARGET, {TARGET}),
        (ErrorKind.OVERLOADED, SOURCE, set()),
    ],
)
def test_a_failed_migration_counts_against_who_is_blamed_for_it(
    kind: ErrorKind, blame: str, left_alone: set[str]
) -> None:
    scene = Scene(breaker_failures=1, breaker_rate=0.1)
    scene.bring_to(MigrationState.OFFERED)
    scene.target_ends(kind, **({"blame": WorkerName(blame)} if blame else {}))
    assert {name for name in (SOURCE, TARGET) if scene.breaker(name) is CircuitState.OPEN} == left_alone


@pytest.mark.parametrize("state", [MigrationState.AHEAD, MigrationState.OFFERED])
def test_a_source_that_says_it_stopped_and_was_not_asked_now_is_told_to_go_on(state: MigrationState) -> None:
    """Its word on a move that was taken back meanwhile comes late, when the next one has begun."""
    scene = Scene()
    scene.bring_to(MigrationState.ASKED)
    scene.on.tick(PATIENCE_S + 0.1)
    assert scene.state is None
    assert scene.begin()
    if state is not MigrationState.AHEAD:
        scene.on.hear(scene.source, PushReady(scene.rid, 0, 0))
        scene.pauses()
    before = len(scene.on.orders)
    scene.pauses()
    assert scene.orders_from(before) == [(SOURCE, ResumeHere(scene.rid, 0))]
    assert scene.state is state


def test_a_request_of_which_all_is_told_is_not_migrated_though_its_end_is_still_to_come() -> None:
    on = Stage(1, 2)
    rid = on.submit()
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 1 + 4)
    assert on.out[rid] == on.answer(rid)[:-1]
    assert on.core.migrations.begin(on.requests[rid]), "one token is to come"
    on.core.migrations.leave(on.requests[rid])
    on.say(rid, DECODE)
    assert on.out[rid] == on.answer(rid)
    assert rid not in on.ends
    assert not on.core.migrations.begin(on.requests[rid])


def test_a_request_that_was_told_out_while_pages_were_copied_ahead_is_not_stopped() -> None:
    scene = Scene()
    before = len(scene.on.orders)
    scene.on.say(scene.rid, DECODE, 3)
    scene.on.hear(scene.source, PushReady(scene.rid, 0, 0))
    assert not scene.orders_from(before), "neither asked to stop it nor told to go on with what never stopped"
    assert (scene.state, scene.on.core.migrations.counts.stayed) == (None, 1)
    scene.on.finish()
    scene.on.assert_answered(scene.rid)


def test_a_request_is_asked_for_once_its_source_has_nothing_to_copy_ahead() -> None:
    scene = Scene()
    before = len(scene.on.orders)
    scene.on.hear(scene.source, PushReady(scene.rid, 0, 0))
    ((worker, order),) = scene.orders_from(before)
    assert worker == SOURCE
    assert isinstance(order, PauseForMigration)
    assert (order.request_id, order.attempt, order.peer.name) == (scene.rid, 0, TARGET)


def test_what_is_copied_ahead_is_found_under_its_requests_salt() -> None:
    scene = Scene()
    scene.request.salt = "acme\n"
    scene.on.hear(scene.source, PushReady(scene.rid, 0, 2))
    (pull,) = [order for _, order in scene.on.orders if isinstance(order, PullPrefix)]
    assert (pull.salt, pull.tokens) == ("acme\n", scene.request.tokens[:2])


def test_a_target_that_all_requests_are_taken_off_is_told_so() -> None:
    scene = Scene()
    scene.bring_to(MigrationState.OFFERED)
    assert scene.on.core.fail_over(scene.target) == 0, "it is its source's"
    scene.on.play()
    assert (TARGET, 1) in scene.cancelled()
