"""What a router tells the controller of requests: the notable first, a bounded part a second, answers to questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.wire.instances import full
from twinpool.cluster.controller.dashboard_feed import ASK_S, MAX_ASKS, RecordBoard, TooManyAsks
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.messages.request_record import FoundRecords, RecordRing, RequestRecord
from twinpool.router.links.controller_port import REPORT_S
from twinpool.router.records.kept_records import KeptRecords
from twinpool.router.records.make_record import RecordDraft
from twinpool.router.service.record_keeping import MAX_ANSWERS, WAITING_REPORTS, RecordReports


def record(request_id: str, **changes: Any) -> RequestRecord:
    made: RequestRecord = full(RequestRecord, request_id=request_id, **changes)
    return made


def draft(number: int, *, outcome: str = "stop", attempts: int = 1, first_s: float = 0.1) -> RecordDraft:
    return RecordDraft(
        "router", "demo", f"r{number}-0", f"r{number}", f"c{number}", "", "", "", False, 10.0, 10.0, 12.0,
        10.0 + first_s, 1e9 + number, outcome, "", 3, 4, attempts, 0, (), (), (), 0,
    )  # fmt: skip


class Listener:
    """A controller that may be away. Implements `router.links.controller_port.RecordListener`."""

    def __init__(self) -> None:
        self.heard: list[list[str]] = []
        self.answers: list[tuple[int, list[str]]] = []
        self.away = False
        self.ask: Callable[[int, str], None] = lambda number, request_id: None

    async def report_records(
        self, router: str, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]
    ) -> None:
        if self.away:
            raise ConnectionError("it is away")
        self.heard += [[one.request_id for one in records]] if records else []
        self.answers += [(number, [one.request_id for one in found]) for number, found in answers]

    async def find_records(self, request_id: str, recent: int = 0) -> FoundRecords:
        raise NotImplementedError

    def on_record_ask(self, answer: Callable[[int, str], None]) -> None:
        self.ask = answer


class Scene:
    def __init__(self, most: int = 4) -> None:
        self.clock, self.listener = ManualClock(50.0), Listener()
        ring: RecordRing[RecordDraft] = RecordRing(100, 1 << 20)
        self.kept = KeptRecords("router", "demo", ring, self.clock, lambda: 1e9, lambda: ())
        self.reports = RecordReports(self.kept, self.listener, self.clock, most)

    def end(self, one: RecordDraft) -> None:
        self.kept.ring.put(one)
        for listener in self.kept.listeners:
            listener(one)

    async def tick(self) -> None:
        self.clock.advance(REPORT_S)
        self.reports.calls.tick()
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_report_has_the_notable_first_then_the_slowest_then_the_newest_and_no_more_than_it_may() -> None:
    scene = Scene(most=4)
    for number in range(8):
        scene.end(draft(number, outcome="worker" if number == 0 else "stop", first_s=9.0 if number == 3 else 0.1))
    scene.end(draft(1, attempts=2))
    await scene.tick()
    assert scene.listener.heard == [["r0-0", "r1-0", "r3-0", "r7-0"]]
    assert (scene.reports.reported, scene.reports.left_out) == (4, 4)
    await scene.tick()
    assert len(scene.listener.heard) == 1, "what was left out isn't told later"


@pytest.mark.asyncio
async def test_notable_records_wait_for_the_next_report_and_the_wait_is_bounded() -> None:
    scene = Scene(most=2)
    for number in range(5):
        scene.end(draft(number, outcome="worker"))
    await scene.tick()
    await scene.tick()
    assert scene.listener.heard == [["r0-0", "r1-0"], ["r2-0", "r3-0"]]
    for number in range(10, 110):
        scene.end(draft(number, outcome="worker"))
    assert scene.reports.left_out == 101 - 2 * WAITING_REPORTS


@pytest.mark.asyncio
async def test_without_room_a_usual_record_goes_before_a_notable_one_that_is_older() -> None:
    scene = Scene(most=1)
    scene.end(draft(0, outcome="worker"))
    for number in range(1, WAITING_REPORTS + 3):
        scene.end(draft(number))
    await scene.tick()
    assert scene.listener.heard == [["r0-0"]]


@pytest.mark.asyncio
async def test_a_controller_that_is_away_costs_its_report_and_nothing_else() -> None:
    scene = Scene()
    scene.listener.away = True
    scene.end(draft(1))
    await scene.tick()
    scene.listener.ask(7, "r1")
    await scene.tick()
    assert (scene.reports.reported, scene.reports.left_out, scene.reports.unanswered) == (0, 1, 1)
    scene.listener.away = False
    scene.end(draft(2))
    await scene.tick()
    assert scene.listener.heard == [["r2-0"]]


@pytest.mark.asyncio
async def test_a_router_answers_about_any_request_that_it_keeps_by_every_id_that_a_client_may_have() -> None:
    scene = Scene()
    scene.end(draft(1))
    for number, asked in enumerate(("r1", "r1-0", "chatcmpl-r1", "resp_r1", "msg_r1", "c1", "chatcmpl-c1", "r")):
        scene.listener.ask(number, asked)
    await scene.tick()
    known = {number: bool(found) for number, found in scene.listener.answers}
    assert known == {0: True, 1: True, 2: True, 3: True, 4: True, 5: True, 6: False, 7: False}


@pytest.mark.asyncio
async def test_so_many_questions_are_answered_at_once_and_those_that_were_make_room_for_others() -> None:
    scene = Scene()
    scene.end(draft(1))
    for number in range(MAX_ANSWERS + 2):
        scene.listener.ask(number, "r1")
    await scene.tick()
    assert [number for number, _ in scene.listener.answers] == list(range(MAX_ANSWERS))
    assert scene.reports.unanswered == 2
    scene.listener.ask(99, "r1")
    await scene.tick()
    assert scene.listener.answers[-1] == (99, ["r1-0"])
    assert scene.reports.unanswered == 2


@pytest.mark.asyncio
async def test_a_router_that_ends_gives_up_its_report_and_its_answers() -> None:
    scene = Scene()
    scene.end(draft(1))
    scene.listener.ask(7, "r1")
    scene.reports.calls.tick()
    scene.reports.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (scene.listener.answers, scene.listener.heard) == ([], [])


@pytest.mark.asyncio
async def test_reports_and_answers_have_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.router.service.record_keeping.REPORT_BYTES", 2 * draft(1).nbytes)
    scene = Scene(most=4)
    for number in range(4):
        scene.end(draft(number, outcome="worker"))
    await scene.tick()
    assert scene.listener.heard == [["r0-0", "r1-0"]]
    assert scene.reports.left_out == 2
    monkeypatch.setattr("twinpool.router.service.record_keeping.REPORT_BYTES", 1)
    scene.listener.ask(7, "r1")
    await scene.tick()
    assert scene.listener.answers == [(7, [])]


def test_a_ring_is_bounded_by_records_and_by_bytes_and_the_oldest_go_first() -> None:
    size = record("r-0").nbytes
    ring: RecordRing[RequestRecord] = RecordRing(10, 4 * size)
    for number in range(6):
        ring.put(record(f"r-{number}"))
    assert len(ring) == 4 or ring.nbytes <= 4 * size
    assert ring.nbytes == sum(one.nbytes for one in ring)
    assert ring.recent(2)[0].request_id == "r-5"
    few: RecordRing[RequestRecord] = RecordRing(2, 1 << 30)
    for number in (1, 2, 3, 2):
        few.put(record(f"r-{number}", router="a"))
    assert [one.request_id for one in few] == ["r-3", "r-2"]
    none: RecordRing[RequestRecord] = RecordRing(0, 1 << 30)
    none.put(record("r-1"))
    assert (len(none), none.nbytes) == (0, 0)


@pytest.mark.asyncio
async def test_the_controller_asks_routers_for_what_it_lacks_and_waits_for_all_of_them_or_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board, asked = RecordBoard(wall=lambda: 1e9), list[tuple[int, str]]()

    def ask(number: int, request_id: str) -> int:
        asked.append((number, request_id))
        return 2

    kept = record("kept-0", answer_id="kept")
    board.take([kept], ())
    assert (await board.find("kept", ask)).records == [kept]
    assert asked == [], "it is in the ring"
    finding = asyncio.ensure_future(board.find("other", ask))
    await asyncio.sleep(0)
    (number, _), other = asked[0], record("other-0")
    board.take((), [(number, [other])])
    await asyncio.sleep(0)
    assert not finding.done(), "the second router hasn't answered"
    board.take((), [(number, ()), (number + 99, [kept])])
    found = await finding
    assert (found.records, found.asked, found.answered) == ([other], 2, 2)
    assert ASK_S > 0
    monkeypatch.setattr("twinpool.cluster.controller.dashboard_feed.ASK_S", 0.0)
    silent = await board.find("nobody", ask)
    assert (silent.records, silent.asked, silent.answered) == ([], 2, 0)
    assert (await board.find("none watch", lambda number, request_id: 0)).asked == 0


@pytest.mark.asyncio
async def test_so_many_questions_are_open_at_once_and_no_more() -> None:
    board = RecordBoard(wall=lambda: 1e9)
    open_asks = [asyncio.ensure_future(board.find(f"r{n}", lambda number, request_id: 1)) for n in range(MAX_ASKS)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyAsks):
        await board.find("one more", lambda number, request_id: 1)
    for one in open_asks:
        one.cancel()
    await asyncio.gather(*open_asks, return_exceptions=True)
    assert (await board.find("again", lambda number, request_id: 0)).records == []
