"""Runs of batches beside a router that does as it is told: what is asked again and when, what ends a line, idle
capacity, and what is kept when a run is ended at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.batch.test_batch_files import Wall, line, put, store_of, unsynced
from tests.router.http_server import eventually
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind, RequestError, TwinpoolError
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.batch import batch_lines, batch_runner
from twinpool.router.batch.batch_runner import BatchRun, BatchRunner
from twinpool.router.batch.batch_store import BatchStore, StorageFull, StoredBatch
from twinpool.router.openai.api_errors import Asleep, QueueFull
from twinpool.router.service.admission import SLOW_START_S, BodyBuffer, IdleCapacity
from twinpool.router.service.open_answers import ClientRequest

URL = "/v1/completions"
__all__ = ["unsynced"]


class Answer:
    """An answer that is open: `ends` is set when it has ended."""

    def __init__(self, *, failed: Done | None = None, timeout_s: float = 60.0, stream: bool = False) -> None:
        self.request = SimpleNamespace(stream=stream, chat=False, shape="", grammar_field="")
        self.failed, self.timeout_s, self.ends = failed, timeout_s, asyncio.Event()
        self.ends.set()
        self.answer = SimpleNamespace(whole=lambda timeline: [b'{"a":', b"1}"])

    async def ended(self) -> None:
        await self.ends.wait()


class Service:
    """What runs of batches see of a router. `answers`: what becomes of a request, by the number of its line."""

    def __init__(self) -> None:
        self.clock, self.body_limit = ManualClock(1000.0), 1 << 20
        self.buffer = BodyBuffer(1 << 20)
        self.metrics = SimpleNamespace(of_process=[])
        self.admission = SimpleNamespace(booked=0, max_choices=8)
        self.answers = SimpleNamespace(owners={})
        self.draining = self.leaving = False
        self.background_rows = 1
        workers = SimpleNamespace(needed=list(Role)[:2], roles=list(Role)[:2], served=ServedWeights())
        self.up = {Role.PREFILL: ["p"], Role.DECODE: ["d", "e"]}
        said = {"routers": 1, "running": 0, "waiting": 0, "background": 0}
        records = {
            name: SimpleNamespace(record=SimpleNamespace(name=name), status=SimpleNamespace(**said)) for name in "pde"
        }
        self.core = SimpleNamespace(
            workers=workers, serving=lambda role: [records[name] for name in self.up.get(role, [])]
        )
        self.script: Callable[[int], Answer | Exception] = lambda number: Answer()
        self.asked: list[tuple[int, float, ClientRequest]] = []
        """Number of the line, when, and what."""
        self.open_now: set[Answer] = set()
        self.lets_go: asyncio.Event | None = None
        """Where it is set, nothing is opened, and who gives up waits for it."""

    async def open(self, asked: ClientRequest) -> Answer:
        number = int(asked.client_id.rpartition("-")[2])
        self.asked.append((number, self.clock.now(), asked))
        if self.lets_go is not None:
            try:
                await asyncio.Event().wait()
            finally:
                await self.lets_go.wait()
        answer = self.script(number)
        if isinstance(answer, Exception):
            raise answer
        self.open_now.add(answer)
        return answer

    def abandon(self, answer: Answer) -> None:
        self.open_now.discard(answer)


class Rig:
    """A runner, driven by hand."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.wall = Wall()
        self.store: BatchStore = store_of(folder, self.wall, **{"sync_s": 0.001, **limits})
        self.service = Service()
        self.runner = BatchRunner(self.service, self.store, self.wall)  # type: ignore[arg-type]

    def submit(self, lines: list[dict[str, Any]], tenant: str = "a", seconds: int = 100) -> StoredBatch:
        content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        return self.store.create(tenant, put(self.store, tenant, content), URL, "24h", seconds, None)

    async def turn(self) -> None:
        """One turn of the runner that looks for batches, and all that comes of it without time passing."""
        self.runner.look()
        await self.runner.turn()
        await eventually(lambda: not any(self._begins(run) for run in self.runner.runs.values()))
        self.runner.begin_lines()
        await eventually(lambda: self.runner.asking == len(self.service.open_now))

    @staticmethod
    def _begins(run: BatchRun) -> bool:
        return run.batch.status == "validating" or not (run.begun or run.batch.ended)

    @property
    def run(self) -> BatchRun:
        (run,) = self.runner.runs.values()
        return run

    async def ended(self, batch: StoredBatch) -> StoredBatch:
        found: list[StoredBatch] = []

        def over() -> bool:
            shown = self.store.batch(batch.tenant, batch.id)
            assert shown is not None
            found[:] = [shown]
            return shown.ended

        await eventually(over)
        return found[0]

    def lines(self, batch: StoredBatch) -> dict[str, Any]:
        """Lines of both files by their name; none twice."""
        told: list[tuple[str, Any]] = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            found = self.store.file(batch.tenant, file_id)
            if found is not None:
                told += [(one["custom_id"], one) for one in map(json.loads, found[1].read_bytes().splitlines())]
        assert len(dict(told)) == len(told), "a request has two lines"
        return dict(told)


@asynccontextmanager
async def rig(folder: Path, **limits: Any) -> AsyncIterator[Rig]:
    made = Rig(folder, **limits)
    try:
        yield made
    finally:
        await made.runner.close()
    assert made.service.buffer.held == 0
    assert not made.service.open_now
    assert made.runner.asking == 0


def request(number: int, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"n{number}", "method": "POST", "url": URL, "body": {"prompt": "x", **body}}


def failed(kind: ErrorKind) -> Answer:
    return Answer(failed=Done(RequestId("r"), 0, "error", error=kind, message="words"))


@pytest.mark.asyncio
async def test_lines_without_a_seed_have_one_each_and_the_same_when_another_router_asks_them(tmp_path: Path) -> None:
    seeds: list[dict[int, int | None]] = []
    batch = None
    for _ in range(2):
        async with rig(tmp_path) as made:
            batch = batch or made.submit([request(number) for number in range(4)])
            made.service.script = endless
            await made.turn()
            seeds.append({number: asked.background for number, _, asked in made.service.asked})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == len(seeds[0]) == 4


def endless(number: int = 0) -> Answer:
    """One that ends when its `ends` is set."""
    answer = Answer()
    answer.ends.clear()
    return answer


ALWAYS = 99


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("outcome", "times", "asked", "said"),
    [
        (lambda: QueueFull("full"), 4, 5, (200, None)),
        (Asleep, 4, 5, (200, None)),
        (lambda: failed(ErrorKind.OVERLOADED), 4, 5, (200, None)),
        (lambda: failed(ErrorKind.CANCELLED), 4, 5, (200, None)),
        (lambda: failed(ErrorKind.WORKER), 2, 3, (200, None)),
        (lambda: failed(ErrorKind.WORKER), ALWAYS, 3, (503, "worker_failed")),
        (lambda: failed(ErrorKind.DEADLINE), ALWAYS, 3, (504, "deadline")),
        (lambda: failed(ErrorKind.INVALID), ALWAYS, 1, (400, "invalid")),
        (lambda: RequestError("prompt is wrong", param="prompt"), ALWAYS, 1, (400, None)),
        (lambda: TwinpoolError("?"), ALWAYS, 3, (500, "internal")),
        (lambda: ZeroDivisionError("our own bug"), ALWAYS, 1, (500, "internal")),
        (lambda: OSError("our own bug as well"), ALWAYS, 1, (500, "internal")),
        (lambda: Answer(stream=True), ALWAYS, 1, (400, None)),
        (lambda: Answer(timeout_s=-batch_runner.GRACE_S), ALWAYS, 3, (504, "deadline")),
    ],
)
async def test_what_says_nothing_of_a_request_is_asked_again_and_what_does_ends_its_line(
    tmp_path: Path, outcome: Callable[[], Answer | Exception], times: int, asked: int, said: tuple[int, str | None]
) -> None:
    async with rig(tmp_path, line_tries=3) as made:
        batch = made.submit([request(0, prompt="x" * 100_000)])  # Its memory is booked, and given back.

        def script(number: int) -> Answer | Exception:
            answer = outcome() if len(made.service.asked) <= times else Answer()
            if isinstance(answer, Answer) and answer.timeout_s < 0:
                answer.ends.clear()
            return answer

        made.service.script = script
        for _ in range(asked + 2):
            await made.turn()
            await eventually(lambda: made.runner.asking == 0)
            made.service.clock.advance(60)
        batch = await made.ended(batch)
        assert len(made.service.asked) == asked
        response = made.lines(batch)["n0"]["response"]
        error = response["body"].get("error", {})
        assert (response["status_code"], error.get("code")) == said
        good = said[0] == 200
        assert (batch.status, batch.completed, batch.failed) == ("completed", int(good), int(not good))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "gaps"),
    [(ErrorKind.WORKER, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]), (ErrorKind.OVERLOADED, [0.5] * 3)],
)
async def test_a_failed_line_is_asked_ever_later_and_one_without_room_soon(
    tmp_path: Path, kind: ErrorKind, gaps: list[float]
) -> None:
    async with rig(tmp_path, line_tries=20) as made:
        made.submit([request(0)])
        made.service.script = lambda number: failed(kind)
        await made.turn()
        for number, gap in enumerate(gaps, 1):
            for share, asked in ((0.9, number), (0.2, number + 1)):
                made.service.clock.advance(share * gap)
                await made.turn()
                await eventually(lambda: made.runner.asking == 0)
                assert len(made.service.asked) == asked, f"{gap} s after try {number}"


@pytest.mark.asyncio
async def test_a_line_has_the_answers_own_time_and_what_it_held_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "GRACE_S", 0.0)
    async with rig(tmp_path) as made:
        batch, held = made.submit([request(0, prompt="x" * 300_000)]), list[int]()

        def slow(number: int) -> Answer:
            held.append(made.service.buffer.held)
            return endless()

        made.service.script = slow
        await made.turn()
        assert made.service.buffer.held == 0, "the body is counted until it was read"
        assert 300_000 - 64 * 1024 < held[0] < 301_000 - 64 * 1024
        next(iter(made.service.open_now)).ends.set()
        await made.ended(batch)
        assert made.lines(batch)["n0"]["response"]["body"] == {"a": 1}


@pytest.mark.asyncio
async def test_bodies_of_lines_leave_half_of_their_memory_to_clients(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        made.submit([request(0, prompt="x" * 300_000), request(1)])
        made.service.buffer.take(500_000)  # Clients', of 1 MiB.
        await made.turn()
        assert [number for number, *_ in made.service.asked] == [1]
        made.service.buffer.give_back(500_000)
        made.service.clock.advance(0.5)
        await made.turn()
        assert [number for number, *_ in made.service.asked] == [1, 0]


@pytest.mark.asyncio
async def test_lines_begin_only_where_there_is_idle_capacity(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        service = made.service

        def idle() -> bool:
            return IdleCapacity(service, 0.0).requests(16) == 16  # type: ignore[arg-type]

        def owner(priority: int, **workers: str) -> None:
            named = {Role[role.upper()]: name for role, name in workers.items()}
            routed = SimpleNamespace(priority=priority, workers=named)
            service.answers.owners[len(service.answers.owners)] = (None, SimpleNamespace(request=routed))

        assert idle()
        for booked, expected in ((3, True), (4, False), (5, False)):
            service.admission.booked = booked
            assert idle() == expected, "less than half of the queue"
        service.admission.booked = 0
        for served in (ServedWeights(paused=True), ServedWeights(asleep=1), ServedWeights(asleep=2)):
            service.core.workers.served = served
            assert not idle()
        service.core.workers.served = ServedWeights()
        for role in (Role.PREFILL, Role.DECODE):
            before = service.up.pop(role)
            assert not idle(), f"no {role} worker serves"
            service.up[role] = before
        for rows in (0, 1):
            service.background_rows = rows
            service.answers.owners.clear()
            owner(BACKGROUND, prefill="p", decode="d")
            owner(BACKGROUND, prefill="p", decode="e")
            owner(BACKGROUND - 5, prefill="p", decode="e")
            assert idle(), "what runs are lines"
            owner(BACKGROUND + 1, prefill="p", decode="d")
            assert idle(), "decode worker e runs none else"
            owner(0, prefill="p", decode="e")
            assert idle() == bool(rows)


@pytest.mark.asyncio
async def test_a_worker_that_has_just_become_idle_counts_for_one_line_and_soon_for_twice_as_many(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as made:
        service = made.service
        service.background_rows = 0
        idle = IdleCapacity(service, 0.5)  # type: ignore[arg-type]
        routed = SimpleNamespace(priority=0, workers={Role.PREFILL: "p", Role.DECODE: "d"})
        service.answers.owners[0] = (None, SimpleNamespace(request=routed))
        assert idle.requests(16) == 16, "e was never seen busy"
        routed.workers[Role.DECODE] = "e"
        assert idle.requests(16) == 0, "d has just become idle"
        service.clock.advance(0.5)
        assert idle.requests(16) == 1, "it has been for the time that is to be quiet"
        service.answers.owners.clear()
        assert idle.requests(16) == 1, "e has just become idle"
        service.clock.advance(0.5)
        counts = []
        for _ in range(4):
            counts.append(idle.requests(16))
            service.clock.advance(SLOW_START_S)
        assert counts == [5, 10, 16, 16], "e for 1, 2, 4, and d for 4, 8, 16"
        assert idle.requests(10) == 10


@pytest.mark.asyncio
async def test_a_worker_is_not_idle_while_another_router_has_requests_there_that_are_no_lines(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        service = made.service
        service.background_rows, service.up[Role.DECODE] = 0, ["d"]
        idle = IdleCapacity(service, 0.5)  # type: ignore[arg-type]
        (status,) = (entry.status for entry in service.core.serving(Role.DECODE))
        for routers, running, waiting, background, expected in (
            (2, 3, 1, 4, True), (2, 3, 2, 4, False), (2, 1, 0, 0, False), (2, 0, 1, 0, False), (1, 3, 2, 4, True),
        ):  # fmt: skip
            service.clock.advance(20 * SLOW_START_S)
            status.routers, status.running, status.waiting, status.background = routers, running, waiting, background
            assert (idle.requests(16) == 16) == expected, (routers, running, waiting, background)


@pytest.mark.asyncio
async def test_one_line_wakes_what_sleeps_for_want_of_requests_and_the_others_follow(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        made.submit([request(number) for number in range(4)])
        made.service.script = endless
        workers = made.service.core.workers
        for served, asked in (
            (ServedWeights(asleep=1), 0), (ServedWeights(asleep=1, by_demand=True), 1), (ServedWeights(), 4),
        ):  # fmt: skip
            workers.served = served
            for _ in range(2):
                await made.turn()
            assert len(made.service.asked) == asked


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["draining", "leaving"])
async def test_a_router_that_ends_lets_go_of_its_batches_and_takes_none(tmp_path: Path, end: str) -> None:
    async with rig(tmp_path) as made, rig(tmp_path) as other:
        made.submit([request(0)])
        made.service.script = endless
        await made.turn()
        await other.turn()
        assert (made.runner.asking, len(other.runner.runs)) == (1, 0)
        setattr(made.service, end, True)
        await made.turn()
        assert (made.runner.asking, len(made.runner.runs), made.service.open_now) == (0, 0, set())
        await other.turn()
        assert len(other.service.asked) == 1


@pytest.mark.asyncio
async def test_lines_under_way_have_a_bound_and_are_shared_by_tenants_not_by_batches(tmp_path: Path) -> None:
    async with rig(tmp_path, concurrency=6) as made:
        made.service.script = endless
        for tenant, batches in (("many", 5), ("few", 1)):
            for _ in range(batches):
                made.submit([request(number) for number in range(9)], tenant)
        made.service.core.workers.served = ServedWeights(paused=True)
        await made.turn()  # All of them are checked before any asks.
        made.service.core.workers.served = ServedWeights()
        for _ in range(3):
            await made.turn()
        assert Counter(asked.tenant for *_, asked in made.service.asked) == {"many": 3, "few": 3}


@pytest.mark.asyncio
async def test_each_request_has_one_line_when_time_is_over_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, concurrency=2) as made:
        batch = made.submit([request(number) for number in range(5)])
        full = [True]

        def room(store: BatchStore, folder: Path, more: int) -> None:
            if full[0]:
                raise StorageFull("full")

        monkeypatch.setattr(BatchStore, "check_room", room)
        await made.turn()
        await eventually(lambda: made.run.full_until > 0 and len(made.run.unwritten) == 2)
        made.wall.at += 101
        await eventually(lambda: len(made.run.unwritten) == 5)
        full[0] = False
        made.service.clock.advance(10)
        batch = await made.ended(batch)
        assert (batch.status, batch.completed, batch.failed) == ("expired", 2, 3)
        codes = {name: (one["error"] or {}).get("code") for name, one in made.lines(batch).items()}
        assert codes == {"n0": None, "n1": None, **dict.fromkeys(("n2", "n3", "n4"), "batch_expired")}


async def half_written(made: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[StoredBatch, Answer, threading.Event]:
    """A batch of two lines, of which the first is being written until the event is set, and the second is asked."""
    batch, late = made.submit([request(0), request(1)]), endless()
    made.service.script = lambda number: late if number else Answer()
    writes, goes_on, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow(file: int) -> None:
        writes.set()
        assert goes_on.wait(60)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", slow)
    await made.turn()
    await eventually(writes.is_set)
    return batch, late, goes_on


@pytest.mark.asyncio
async def test_what_is_answered_while_lines_are_written_is_written_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as made:
        batch, late, goes_on = await half_written(made, monkeypatch)
        late.ends.set()
        await eventually(lambda: made.runner.asking == 0)
        goes_on.set()
        await made.ended(batch)
        assert set(made.lines(batch)) == {"n0", "n1"}


@pytest.mark.asyncio
async def test_a_batch_is_another_routers_only_when_the_last_write_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as made, rig(tmp_path) as other:
        _, _, goes_on = await half_written(made, monkeypatch)
        closing = asyncio.ensure_future(made.runner.close())
        for _ in range(20):
            await asyncio.sleep(0)
        await other.turn()
        assert not other.runner.runs
        goes_on.set()
        await closing
        await other.turn()
        await eventually(lambda: bool(other.service.asked))
        assert [number for number, *_ in other.service.asked] == [1], "the first has its line"


@pytest.mark.asyncio
async def test_a_batch_is_another_routers_only_when_what_it_asks_has_let_go(tmp_path: Path) -> None:
    async with rig(tmp_path) as made, rig(tmp_path) as other:
        made.submit([request(0)])
        made.service.lets_go = asyncio.Event()
        made.runner.look()
        await made.runner.turn()
        await eventually(lambda: made.run.batch.status == "in_progress")
        made.runner.begin_lines()
        await eventually(lambda: bool(made.service.asked))
        closing = asyncio.ensure_future(made.runner.close())
        for _ in range(20):
            await asyncio.sleep(0)
        await other.turn()
        assert not other.runner.runs
        made.service.lets_go.set()
        await closing
        await other.turn()
        assert [number for number, *_ in other.service.asked] == [0]


def test_lines_that_a_crash_left_are_counted_with_the_file_that_has_them(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(line(0) + line(1))
    (tmp_path / "err").write_bytes(line(3))
    log = batch_lines.AnswerLog([tmp_path / "out", tmp_path / "err"], "x_", 4)
    log.close()
    assert (log.counts, list(log.done)) == ([2, 1], [1, 1, 0, 1])
