"""The tables of who leaves, what is waited for, and handles that outlive their worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stepped_cluster import Company, company, generated
from tests.support.worker_parts import advisor_of, leaving, peers_of, receiver_of, table_of
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import IllegalTransition
from twinpool.contracts.ids import Incarnation, Role, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import (
    Command,
    PauseForMigration,
    PeerRef,
    PullPrefix,
    PushPrefix,
    ResumeHere,
)
from twinpool.contracts.messages.worker_events import (
    Event,
    MigrationDone,
    MigrationPaused,
    MigrationUndone,
    MigrationWanted,
    PrefixOffered,
    PullDone,
    PushReady,
)
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.message_codec import FrameWriter, decode_commands, decode_events, encode_events
from twinpool.decode.migration.drain_offers import JUDGE_EVERY_S, STEPS_TO_TELL
from twinpool.decode.migration.outgoing_migrations import STAGES, MigrationStage, MigrationStageEvent
from twinpool.decode.migration.prefix_push import PUSH_TABLE
from twinpool.router.migration.migration_table import MIGRATION, MigrationEvent, MigrationState
from twinpool.transfer.planes.data_plane import RoomTarget, SlotWrite
from twinpool.transfer.rooms.room_messages import HandoverReceived, WriterQuiesced
from twinpool.transfer.rooms.sender.write_queue import QueuedWrite

PEER = PeerRef(WorkerName("decode-1"), Incarnation(3), "tcp://127.0.0.1:7")
COMMANDS: list[Command] = [
    PauseForMigration("r", 2, RoomId("a"), PEER),  # type: ignore[arg-type]
    ResumeHere("r", 2),  # type: ignore[arg-type]
    PushPrefix("r", 2, RoomId("a"), PEER, (1, 2, 3), "salt"),  # type: ignore[arg-type]
    PullPrefix("r", 2, RoomId("a"), PEER, (1, 2, 3), "salt", True),  # type: ignore[arg-type]
]
EVENTS: list[Event] = [
    MigrationWanted("r", 2, True, False),  # type: ignore[arg-type]
    MigrationWanted("r", 2, False, True),  # type: ignore[arg-type]
    MigrationPaused("r", 2, 77),  # type: ignore[arg-type]
    MigrationUndone("r", 2, "because"),  # type: ignore[arg-type]
    MigrationDone("r", 2, 1 << 40),  # type: ignore[arg-type]
    PushReady("r", 2, 64),  # type: ignore[arg-type]
    PullDone("r", 2, 1 << 33),  # type: ignore[arg-type]
    PrefixOffered("r", 2, (5, 6), "salt"),  # type: ignore[arg-type]
]


def test_what_is_said_of_migrations_travels_unchanged() -> None:
    assert [decode_commands(frame) for frame in FrameWriter().frames(COMMANDS)] == [(tuple(COMMANDS), 0)]
    assert decode_events(encode_events(Incarnation(1), EVENTS))[0].events == tuple(EVENTS)


def test_c5_every_migration_and_prefix_push_comes_to_an_end() -> None:
    assert [table.dead_ends() for table in (STAGES, MIGRATION, PUSH_TABLE)] == [[], [], []]


def test_c8_what_has_migrated_or_stayed_does_so_for_good() -> None:
    for stage in (MigrationStage.GONE, MigrationStage.BACK):
        for event in MigrationStageEvent:
            with pytest.raises(IllegalTransition):
                STAGES.next(stage, event)
    for state in (MigrationState.MIGRATED, MigrationState.STAYED):
        for happening in MigrationEvent:
            with pytest.raises(IllegalTransition):
                MIGRATION.next(state, happening)


def test_a_request_can_be_taken_back_until_the_other_has_it_and_not_after() -> None:
    assert all(MigrationStageEvent.BACK in row and MigrationStageEvent.END in row for row in STAGES.rows.values())
    assert MigrationEvent.BACK not in MIGRATION.rows[MigrationState.GIVEN], "the source has nothing of it any more"
    assert [s for s, row in MIGRATION.rows.items() if MigrationEvent.SPOKE in row] == [
        MigrationState.OFFERED,
        MigrationState.GIVEN,
    ]


def _held_back(c: Company) -> list[Callable[[], object]]:
    """decode-0's word that it has received something doesn't go out; each call of the list lets one of them go."""
    peers = peers_of(receiver_of(c.decode("decode-0")))
    send, held = peers.send, list[Callable[[], object]]()

    def hold(peer: Any, message: Any) -> bool:
        if not isinstance(message, HandoverReceived):
            return send(peer, message)
        held.append(partial(send, peer, message))
        return False

    peers.send = hold  # type: ignore[method-assign]
    return held


def test_d2_a_draining_prefill_worker_waits_for_its_outgoing_transfers_and_says_whose(model: Path) -> None:
    with company(model, decodes=1) as c:
        worker, held = c.workers[WorkerName("prefill-0")], _held_back(c)
        rid = c.submit(list(range(60)), SamplingParams(8, temperature=0.0))
        c.run(rid)
        c.drain("prefill-0")
        c.step()
        status = worker.status()
        assert (status.running, status.outgoing) == (0, 1), "computed and written, and not confirmed"
        assert not worker.drained
        assert status.counters["outgoing_to:decode-0"] == 1
        held.pop()()
        c.until(lambda: worker.drained, "the word of decode")
        assert not [k for k in worker.status().counters if k.startswith("outgoing_to:")]


def test_d2_a_transfer_whose_reader_never_confirms_holds_a_drain_up_no_longer_than_it_may(model: Path) -> None:
    clock = ManualClock(100.0)
    with company(model, decodes=1, clock=clock, settle=False, transfer={"room_timeout_s": 30.0}) as c:
        worker, _ = c.workers[WorkerName("prefill-0")], _held_back(c)
        c.run(c.submit(list(range(60)), SamplingParams(8, temperature=0.0)))
        c.drain("prefill-0")
        c.step()
        assert worker.status().outgoing == 1
        assert not worker.drained
        clock.advance(31.0)
        c.step("prefill-0")
        assert worker.drained


def _moving(c: Company, tokens: int = 40) -> Any:
    rid = c.submit(list(range(60)), SamplingParams(tokens, temperature=0.0))
    c.until(generated(c, rid, 5), "it to run")
    return rid


class _Held:
    """A write that completes when the test says so."""

    done = False

    def wait(self) -> None:
        self.done = True

    order = wait


def _queued(room: RoomId, completion: object) -> QueuedWrite:
    """A write that is under way."""
    queued = QueuedWrite(room, SlotWrite(RoomTarget(room, {}, 0), b""), (), (), 0)
    queued.completion = completion  # type: ignore[assignment]
    return queued


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_d2_a_worker_does_not_leave_while_it_still_writes_for_a_room_that_has_ended(model: Path, name: str) -> None:
    """Its pages are pinned, and the reader is still to be told that it may use its own again."""
    with company(model) as c:
        rid = c.submit(list(range(60)), SamplingParams(40, temperature=0.0))
        c.until(generated(c, rid, 5), "it to run")
        if name == "decode-0":
            assert c.core.migrations.begin(c.told[rid].request)
            c.act()
        c.run(rid)
        worker = c.workers[WorkerName(name)]
        sender = worker.setup.sender  # type: ignore[attr-defined]
        (peer,) = peers_of(sender).values()
        write = _Held()
        peer.writes._writes.append(_queued(RoomId("over"), write))
        peer.writes.say(WriterQuiesced(RoomId("over"), 7))
        c.drain(name)
        c.until(lambda: worker.status().running + worker.status().waiting == 0, "its requests to end", 1000)
        c.until(lambda: sender.rooms == 0, "its rooms to end")
        for _ in range(50):
            c.step()
        assert not worker.drained
        write.done = True
        c.until(lambda: worker.drained, "it to be empty", 1_000_000)
        assert not len(peer.writes)


def test_d3_a_restarted_target_is_a_stranger_to_rooms_of_its_predecessor(model: Path) -> None:
    with company(model, decode={"migration_chunk_bytes": 1}) as c:
        rid = _moving(c)
        assert c.worker_of(rid) == "decode-0"
        c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: leaving(c.decode("decode-0")) > 0, "it to be stopped")
        c.gone("decode-1")
        c.start(Role.DECODE, WorkerName("decode-1"))
        # The move to incarnation 1 came to nothing; the request is whole, and may move to incarnation 2.
        c.until(lambda: not leaving(c.decode("decode-0")), "it to go on")
        assert c.core.migrations.begin(c.told[rid].request) or c.told[rid].request.avoid
        c.act()
        assert c.run(rid) == c.run(c.submit(list(range(60)), SamplingParams(40, temperature=0.0)))
        assert c.told[rid].replays == []
        assert c.decode("decode-0").check().violations == ()


def test_d3_a_restarted_source_is_not_asked_for_what_its_predecessor_had(model: Path) -> None:
    with company(model, decode={"migration_chunk_bytes": 1}) as c:
        rid = _moving(c)
        c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: leaving(c.decode("decode-0")) > 0, "it to be stopped")
        c.gone("decode-0")
        c.start(Role.DECODE, WorkerName("decode-0"))
        assert c.run(rid) == c.run(c.submit(list(range(60)), SamplingParams(40, temperature=0.0)))
        assert len(c.told[rid].replays) == 1, "what the dead one held is computed again, once"


def _expect_sleep(c: Company, clock: ManualClock) -> None:
    """No deadline of decode-0's migrations lies in the past: whoever is woken for one turns and turns."""
    assert c.decode("decode-0").report.next_due(clock) > 0


def test_what_a_worker_thought_of_a_request_wakes_it_only_where_it_would_think_again(model: Path) -> None:
    clock = ManualClock()
    with company(model, clock=clock) as c:
        rid, worker = _moving(c), c.decode("decode-0")

        def offered() -> None:
            assert c.core.migrations.begin(c.told[rid].request)
            c.act()
            c.until(lambda: any(r.phase == "leaving" for r in table_of(worker)), "it to be offered")

        offered()
        clock.advance(c.config.decode.migration_pause_s)
        c.step("decode-0")
        assert not leaving(worker), "nobody took it in time"
        clock.advance(JUDGE_EVERY_S + 0.1)
        c.step("decode-0")
        _expect_sleep(c, clock)
        # While it is offered again, on demand, the worker is told to drain: it had better stay, by what is known.
        c.told[rid].request.avoid.clear()
        offered()
        worker.drain()
        clock.advance(JUDGE_EVERY_S + 0.1)
        c.step("decode-0")
        assert leaving(worker)
        _expect_sleep(c, clock)
        worker.undrain()
        c.run(rid)


def test_a_worker_is_woken_for_the_one_that_has_stood_still_longest(model: Path) -> None:
    clock = ManualClock(10.0)
    with company(model, clock=clock) as c:
        c.drain("decode-1")
        worker = c.decode("decode-0")
        rids = [c.submit(list(range(n, n + 40)), SamplingParams(100, temperature=0.0)) for n in (0, 50)]
        c.until(lambda: all(generated(c, rid, 5)() for rid in rids), "both to run")
        c.drain("decode-1", draining=False)
        for number, rid in enumerate(rids):
            assert c.core.migrations.begin(c.told[rid].request)
            c.act()
            for _ in range(20):
                c.step("decode-0")  # decode-1 is told, and makes no round
            assert sum(r.phase == "leaving" for r in table_of(worker)) == number + 1
            clock.advance(0.5)
        assert clock.now() + worker.report.next_due(clock) == 10.0 + c.config.decode.migration_pause_s
        c.run(*rids)


def test_what_a_request_has_to_come_and_its_own_pace_decide_whether_it_migrates(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with company(model) as c:
        advisor = advisor_of(c.decode("decode-0"))
        asked: list[tuple[int, float]] = []
        monkeypatch.setattr(advisor.costs, "worth_migrating", lambda _, most, step_s: asked.append((most, step_s)))
        submit = SimpleNamespace(sampling=SamplingParams(20), tokens=(1, 2, 3))

        def judged(generated: int, **marks: float) -> bool:
            request = SimpleNamespace(
                submit=submit, generated=generated, committed=3 + generated, marks=marks, arrived=100.0
            )
            return advisor._worth_migrating(request, 104.0)  # type: ignore[arg-type]

        assert judged(18), "two are to come, and nothing is known of its pace"
        assert not judged(19), "the last one costs less than any move"
        assert judged(STEPS_TO_TELL - 1, first_step=1.0)
        assert asked == []
        judged(STEPS_TO_TELL, first_step=1.0)
        # Its first step was over at 101: since then three more, in three seconds.
        ((left, pace),) = asked
        assert left == 20 - STEPS_TO_TELL
        assert pace == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["shm", "zmq", "staged"])
def test_requests_migrate_on_every_data_plane(model: Path, plane: str) -> None:
    with company(model, transfer={"plane": plane}, decode={"migration_precopy_bytes": 1}) as c:
        rid = _moving(c, tokens=160)  # Some planes copy on threads of their own, for which it must not end too early.
        assert c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: c.core.migrations.counts.migrated == 1, "it to move")
        assert c.worker_of(rid) == "decode-1"
        assert c.run(rid) == c.run(c.submit(list(range(60)), SamplingParams(160, temperature=0.0)))
        assert c.told[rid].replays == []
