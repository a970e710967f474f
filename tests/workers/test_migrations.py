"""Running requests that go from one decode worker to another: real workers and the real router core, by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.stepped_cluster import Company, company, generated, hears
from tests.support.worker_pair import SESSION, turns
from tests.support.worker_parts import (
    act_on,
    advisor_of,
    leaving,
    manager_of,
    migrating,
    migrations_of,
    receiver_of,
    rooms_of,
    table_of,
)
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.kept_answers import AnswerName, Attach
from twinpool.contracts.messages.worker_events import Event, MigrationDone, MigrationWanted
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.migration.migration_table import AVOID_S
from twinpool.router.state.worker_table import WorkerKey

COUNT = 40


def prompts(seed: int, count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(rng.randint(20, longest))] for _ in range(count)]


def seeded(number: int, count: int = COUNT) -> SamplingParams:
    """Every second one is drawn at random from its seed, with penalties that read all that was said."""
    if number % 2:
        return SamplingParams(max_tokens=count, temperature=0.9, seed=number, repetition_penalty=1.1)
    return SamplingParams(max_tokens=count, temperature=0.0)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[list[int]]:
    """What eight requests are answered when nothing happens."""
    with company(model) as c:
        for number, prompt in enumerate(prompts(1, 8)):
            c.submit(prompt, seeded(number))
        return c.run()


@pytest.fixture
def running(model: Path) -> Iterator[tuple[Company, list[RequestId]]]:
    """The same eight, on two decode workers, in the middle of their answers."""
    with company(model) as c:
        rids = [c.submit(prompt, seeded(number)) for number, prompt in enumerate(prompts(1, 8))]
        c.until(lambda: all(generated(c, rid, 6)() for rid in rids), "all to run")
        yield c, rids


def test_d1_a_drained_worker_hands_its_running_requests_on_and_no_stream_is_altered(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    mine = [rid for rid in rids if c.worker_of(rid) == "decode-0"]
    assert len(mine) == 4
    c.drain("decode-0")
    c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)
    assert all(c.worker_of(rid) == "decode-1" for rid in rids if c.told[rid].done is None)
    assert c.run(*rids) == undisturbed
    assert c.core.migrations.counts.migrated == 4
    assert [c.told[rid].replays for rid in rids] == [[]] * 8, "nothing was computed again"
    assert c.decode("decode-1").status().counters["prompt_tokens_computed"] == 0


STAGES = ["stopping", "offered", "sending", "sent"]


@pytest.fixture
def going(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Company, RequestId]]:
    """One request at the stage of its move that the test asks for, from decode-0 to decode-1, page by page."""
    with company(model, decode={"migration_chunk_bytes": 1}) as c:
        yield c, _bring_to(c, str(request.param))


def _bring_to(c: Company, stage: str) -> RequestId:
    (prompt,) = prompts(2, 1)
    rid = c.submit(prompt, seeded(1))
    c.until(generated(c, rid, 5), "it to run")
    assert c.worker_of(rid) == "decode-0"
    c.core.migrations.begin(c.told[rid].request)
    c.act()
    migrations = migrating(c.decode("decode-0"))
    c.step("decode-0")
    for _ in range(20_000):
        (migration,) = migrations.values()
        if migration.stage == stage:
            assert c.decode("decode-0").check().violations == ()
            return rid
        c.step("decode-1" if migration.stage == "offered" else "decode-0")
        c.step("decode-0")
    raise AssertionError(f"never {stage}: {migration}")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[int]:
    with company(model) as c:
        (prompt,) = prompts(2, 1)
        return c.run(c.submit(prompt, seeded(1)))[0]


@pytest.mark.parametrize("going", STAGES, indirect=True)
def test_b2_a_cancel_in_the_middle_of_a_migration_leaves_nothing_on_either_side(
    going: tuple[Company, RequestId],
) -> None:
    c, rid = going
    c.cancel(rid)


@pytest.mark.slow
@pytest.mark.parametrize("going", STAGES, indirect=True)
def test_a_request_whose_target_dies_goes_on_where_it_was_and_nothing_is_computed_again(
    going: tuple[Company, RequestId], alone: list[int]
) -> None:
    c, rid = going
    c.gone("decode-1")
    assert c.run(rid) == [alone]
    assert c.told[rid].replays == []
    assert c.decode("decode-0").status().counters["migrations_undone"] == 1


@pytest.mark.parametrize("going", STAGES, indirect=True)
def test_a_request_whose_source_dies_is_replayed_elsewhere(going: tuple[Company, RequestId], alone: list[int]) -> None:
    c, rid = going
    c.gone("decode-0")
    assert c.run(rid) == [alone]
    assert len(c.told[rid].replays) == 1


def test_a_router_that_takes_a_request_over_is_told_what_its_draining_worker_wants(model: Path) -> None:
    """Who was told before is gone: unless it is said again, the drain waits until the request ends by itself."""
    with company(model, decodes=2, clock=ManualClock(100.0)) as c:
        rid = c.submit(prompts(3, 1)[0], seeded(0), name=AnswerName("key", "body", 0, 7))
        c.until(lambda: len(c.told[rid].tokens) > 1, "its first tokens")
        worker = c.decode(c.worker_of(rid))
        worker.drain()
        told = [(session, event) for session, event in worker.step() if isinstance(event, MigrationWanted)]
        assert [session for session, _ in told] == [SESSION]
        assert not any(isinstance(event, MigrationWanted) for _, event in worker.step()), "it is told once"
        other = SessionId(SESSION + 1)
        worker.drop_session(SESSION)
        worker.handle(other, Attach(RequestId("ask"), 0, "key", "body"))
        said = [one for _ in range(2) for one in worker.step() if isinstance(one[1], MigrationWanted)]
        assert [(session, event.request_id) for session, event in said] == [(other, rid)]
        worker.drop_session(other)
        c.cancel(rid)


@pytest.mark.parametrize("going", ["offered"], indirect=True)
def test_a_target_that_refuses_sends_the_request_back(going: tuple[Company, RequestId], alone: list[int]) -> None:
    c, rid = going
    worker = c.decode("decode-1")
    worker.drain()
    for request in table_of(worker):
        worker._fail(request, ErrorKind.DRAINING, "planted")
    assert c.run(rid) == [alone]
    assert c.told[rid].replays == []
    assert c.core.migrations.counts.stayed == 1


@pytest.mark.parametrize("going", ["sent"], indirect=True)
def test_where_both_go_on_the_router_hears_one_and_cancels_the_other(
    going: tuple[Company, RequestId], alone: list[int]
) -> None:
    c, rid = going
    source = c.decode("decode-0")
    (migration,) = migrating(source).values()
    act_on(source, migrations_of(source)._back(migration, "planted: it thinks that nobody took it"))
    assert c.run(rid) == [alone]
    assert c.told[rid].replays == []


def _damage(c: Company, worker: str, rid: RequestId, page: int) -> None:
    """One byte of a page of the request changes in the memory of `worker`."""
    manager = c.decode(worker).setup.manager
    (allocation,) = manager.allocations
    index = allocation.tables[manager.full].pages[page]
    manager.pools.layout.buffers[manager.full][0].stack(
        manager.pools.region, manager.pools.layout.counts[manager.full]
    )[0, index] += 1


@pytest.mark.parametrize("going", ["sending"], indirect=True)
def test_state_damaged_on_its_way_is_noticed_and_the_source_whose_state_is_whole_goes_on(
    going: tuple[Company, RequestId], alone: list[int]
) -> None:
    c, rid = going
    target = c.decode("decode-1")
    room = next(iter(rooms_of(receiver_of(target)).values()))
    pools, full = manager_of(target).pools, manager_of(target).full
    index = room.runs[full].indices[room.shares.left(full).start]
    pools.layout.buffers[full][0].stack(pools.region, pools.layout.counts[full])[0, index] += 1
    assert c.run(rid) == [alone]
    assert c.told[rid].replays == []
    assert receiver_of(target).damaged == 1
    assert c.core.migrations.counts.stayed == 1


@pytest.mark.parametrize("going", ["offered"], indirect=True)
def test_state_damaged_at_the_source_is_noticed_there_and_computed_again(
    going: tuple[Company, RequestId], alone: list[int]
) -> None:
    c, rid = going
    _damage(c, "decode-0", rid, 1)
    assert c.run(rid) == [alone]
    (reason,) = c.told[rid].replays
    assert "damaged" in reason


def test_c5_a_stream_stands_still_no_longer_than_it_may(model: Path, alone: list[int]) -> None:
    clock = ManualClock(100.0)
    with company(model, clock=clock, decode={"migration_chunk_bytes": 1, "migration_pause_s": 2.0}) as c:
        rid = _bring_to(c, "offered")
        for _ in range(10):
            c.step("prefill-0", "decode-0")
        (migration,) = migrating(c.decode("decode-0")).values()
        clock.advance(1.9)
        c.step("prefill-0", "decode-0")
        assert migration.stage == "offered"
        clock.advance(0.2)
        c.step("prefill-0", "decode-0")
        assert migration.stage == "back"
        assert c.run(rid) == [alone]
        assert c.told[rid].replays == []


def test_c5_a_target_without_room_says_so_at_once_and_is_asked_ever_more_rarely(model: Path) -> None:
    """No time passes while the stream stands still; and a drain doesn't stop it over and over."""
    clock = ManualClock(100.0)
    with company(model, clock=clock) as c:
        (prompt,) = prompts(2, 1)
        rid = c.submit(prompt, seeded(1, 200))
        c.until(generated(c, rid, 5), "it to run")
        pools = c.decode("decode-1").setup.manager.pools.allocators.values()
        taken = [allocator.lease(allocator.free, "others") for allocator in pools]
        c.drain("decode-0")
        stops: list[float] = []
        counts = c.core.migrations.counts
        while clock.now() < 180.0:
            stayed, rounds = counts.stayed, 0
            while not rounds or leaving(c.decode("decode-0")):
                c.step()
                rounds += 1
                assert rounds < 12, "it stands still, waiting for room"
            if counts.stayed > stayed:
                stops.append(clock.now())
            clock.advance(0.5)
        gaps = [b - a for a, b in pairwise(stops)]
        assert gaps[0] >= AVOID_S
        assert all(later > 1.5 * before for before, later in pairwise(gaps[:3])), gaps
        for lease in taken:
            assert lease is not None
            lease.release()
        moved = c.run(rid)
        assert c.told[rid].replays == []
        assert c.run(c.submit(prompt, seeded(1, 200))) == moved


@pytest.mark.parametrize("stage", STAGES)
def test_b2_a_deadline_in_the_middle_of_a_migration_ends_it_on_both_sides(model: Path, stage: str) -> None:
    clock = ManualClock(100.0)
    with company(model, clock=clock, decode={"migration_chunk_bytes": 1}) as c:
        rid = _bring_to(c, stage)
        clock.advance(c.told[rid].request.deadline - clock.now())
        c.step("prefill-0")
        done = c.told[rid].done
        assert done is not None
        assert done.error is ErrorKind.DEADLINE


@pytest.mark.parametrize("going", STAGES, indirect=True)
def test_b2_a_router_that_is_gone_in_the_middle_of_a_migration_leaves_nothing(going: tuple[Company, RequestId]) -> None:
    c, rid = going
    for worker in c.workers.values():
        worker.drop_session(SESSION)
    c.cancel(rid)


def test_requests_that_have_not_begun_at_a_draining_worker_begin_elsewhere(
    model: Path, undisturbed: list[list[int]]
) -> None:
    with company(model, tokens=256) as c:
        rids = [c.submit(prompt, seeded(number)) for number, prompt in enumerate(prompts(1, 8))]
        c.until(lambda: any(told.tokens for told in c.told.values()), "some to run")
        assert c.decode("decode-0").status().waiting, "some were to wait for room"
        c.drain("decode-0")
        assert c.run(*rids) == undisturbed
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)
        assert c.core.migrations.counts.restarted > 0
        assert c.core.counts.replays == 0, "it costs no request a replay"


def test_an_undrained_worker_keeps_its_requests_and_admits_again(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    c.decode("decode-0").drain()
    c.step("decode-0")
    c.drain("decode-0", draining=False)
    moving = c.core.migrations.counts.begun
    c.until(lambda: not leaving(c.decode("decode-0")), "what had begun to leave to be gone")
    assert c.core.migrations.counts.begun == moving
    assert c.run(*rids) == undisturbed
    again = [c.submit(prompt, seeded(0, 4)) for prompt in prompts(3, 4)]
    assert "decode-0" in {c.worker_of(rid) for rid in again}
    c.run(*again)


def test_the_last_decode_worker_finishes_what_nobody_can_take(model: Path, alone: list[int]) -> None:
    with company(model, decodes=1) as c:
        (prompt,) = prompts(2, 1)
        rid = c.submit(prompt, seeded(1))
        c.until(generated(c, rid, 5), "it to run")
        c.drain("decode-0")
        assert c.run(rid) == [alone]
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)


def test_a_request_that_ends_sooner_than_it_could_migrate_is_left_to_finish(model: Path, alone: list[int]) -> None:
    with company(model) as c:
        (prompt,) = prompts(2, 1)
        rid = c.submit(prompt, seeded(1))
        c.until(generated(c, rid, COUNT - 3), "it to be nearly done")
        advisor_of(c.decode("decode-0")).costs.bytes_per_s = 1.0
        c.drain("decode-0")
        assert c.run(rid) == [alone]
        assert c.core.migrations.counts.begun == 0


def test_a_request_migrates_and_comes_back_again(model: Path) -> None:
    with company(model) as c:
        prompt = list(range(90))
        rid = c.submit(prompt, seeded(1))
        counts, sent = c.core.migrations.counts, list[int]()

        def told(moves: int, before: int) -> bool:
            return counts.migrated == moves and counts.migrated_bytes > before

        for moves in range(1, 5):
            before = counts.migrated_bytes
            c.until(generated(c, rid, 5 * moves), "it to run")
            assert c.core.migrations.begin(c.told[rid].request)
            c.act()
            c.until(partial(told, moves, before), "it to move, and its source to say how much that was")
            sent.append(counts.migrated_bytes - before)
        assert c.run(rid) == c.run(c.submit(prompt, seeded(1)))
        assert all(0 < later < sent[0] for later in sent[1:]), f"of what it left there it is sent nothing: {sent}"


@pytest.mark.parametrize("told", [True, False])
def test_a_request_that_is_lost_with_its_target_after_it_left_is_replayed(
    model: Path, alone: list[int], told: bool
) -> None:
    """The source has nothing of it any more, whether or not the router has heard so."""
    with company(model) as c:
        rid = c.submit(prompts(2, 1)[0], seeded(1))
        c.until(generated(c, rid, 5), "it to run")
        left: list[bool] = []

        def loses(worker: WorkerKey, event: Event) -> bool:
            left.extend([True] * isinstance(event, MigrationDone))
            return worker[0] == "decode-1" or (isinstance(event, MigrationDone) and not told)

        c.between.append(loses)
        assert c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: bool(left), "the source to give it away")
        assert c.told[rid].request.decode == c.key("decode-0"), "nobody has told otherwise"
        c.gone("decode-1")
        assert c.run(rid) == [alone]
        assert len(c.told[rid].replays) == 1


# ---------------------------------------------------------------- copied ahead


@pytest.fixture
def large(model: Path) -> Iterator[tuple[Company, RequestId]]:
    """A request of many pages, which are copied ahead one by one."""
    with company(model, decode={"migration_chunk_bytes": 1, "migration_precopy_bytes": 1}) as c:
        rid = c.submit(list(range(200)), seeded(1, 120))
        c.until(generated(c, rid, 5), "it to run")
        yield c, rid


def test_finished_pages_are_copied_ahead_while_the_stream_goes_on(large: tuple[Company, RequestId]) -> None:
    c, rid = large
    gone = hears(c, MigrationDone)
    before = len(c.told[rid].tokens)
    assert c.core.migrations.begin(c.told[rid].request)
    c.act()
    c.until(lambda: leaving(c.decode("decode-0")) > 0, "it to be stopped")
    assert len(c.told[rid].tokens) > before + 8, "it went on meanwhile"
    c.until(lambda: c.core.migrations.counts.migrated == 1, "it to move")
    c.until(lambda: bool(gone), "the source to say so")
    (moved,) = gone
    assert isinstance(moved, MigrationDone)
    unit = c.decode("decode-0").setup.manager.spec.unit_bytes("full")
    assert c.decode("decode-1").status().counters["fetched_bytes"] >= 12 * unit
    assert moved.bytes <= 3 * unit, "little was left to send while it stood still"
    assert c.run(rid) == c.run(c.submit(list(range(200)), seeded(1, 120)))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["cancel", "decode-0", "decode-1"])
def test_b2_what_is_copied_ahead_is_released_when_a_side_goes(large: tuple[Company, RequestId], who: str) -> None:
    c, rid = large
    assert c.core.migrations.begin(c.told[rid].request)
    c.act()
    # A worker that goes before it has heard of its grant can't give it back, and the process of these workers lives on.
    c.until(lambda: bool(c.decode("decode-0").status().counters["given_bytes"]), "something to be copied")
    assert [c.decode(name).report.allocations for name in ("decode-0", "decode-1")] == [2, 1]
    assert c.decode("decode-0").check().violations == c.decode("decode-1").check().violations == ()
    c.cancel(rid) if who == "cancel" else c.gone(who)
    if who != "cancel":
        (answer,) = c.run(rid)
        assert len(answer) == 120
        assert len(c.told[rid].replays) == (who == "decode-0")


def test_what_is_damaged_on_its_way_ahead_is_not_taken_and_the_migration_goes_on(
    large: tuple[Company, RequestId],
) -> None:
    c, rid = large
    assert c.core.migrations.begin(c.told[rid].request)
    c.act()
    target = c.decode("decode-1")
    c.until(lambda: any(r.state == "granted" for r in rooms_of(receiver_of(target)).values()), "a grant")
    (room,) = rooms_of(receiver_of(target)).values()
    pools, full = manager_of(target).pools, manager_of(target).full
    for _ in turns(500):
        c.step("decode-1")
        c.step("decode-0")
        if c.decode("decode-0").status().counters["given_bytes"]:
            break
    index = room.runs[full].indices[0]
    pools.layout.buffers[full][0].stack(pools.region, pools.layout.counts[full])[0, index] += 1
    c.until(lambda: c.core.migrations.counts.migrated == 1, "it to move")
    assert receiver_of(target).damaged == 1
    assert c.run(rid) == c.run(c.submit(list(range(200)), seeded(1, 120)))
