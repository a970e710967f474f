"""The controller's table as a router puts it together from what comes: whole tables, changes, numbers and questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.wire.instances import full
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import WATCH
from twinpool.contracts.messages.cluster_view import ClusterView, ControlPlane, RecordAsk, WatchRequest
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.router.links.controller_directory import ControllerDirectory

A, B, C = (WorkerName(f"decode-{number}") for number in range(3))
Views = tuple[WorkerView, ...]


def row(name: WorkerName, running: int = 1, incarnation: int = 1, **counters: float) -> WorkerView:
    number = Incarnation(incarnation)
    record = replace(full(WorkerRecord), name=name, role=Role.DECODE, incarnation=number)
    status = replace(
        full(WorkerStatus), name=name, role=Role.DECODE, incarnation=number, running=running,
        counters=counters or {"steps": 1.0}, counters_left_out=False,
    )  # fmt: skip
    return WorkerView(record, status)


def table(*rows: WorkerView, changes: bool = False, numbers: tuple[WorkerStatus, ...] = (), **more: Any) -> ClusterView:
    return ClusterView(1, rows, changes=changes, statuses=numbers, **more)


def take(directory: ControllerDirectory, message: ClusterView) -> None:
    """As if the controller had sent it."""
    directory._take(message)


class Heard:
    """A directory that is given its messages by hand."""

    def __init__(self) -> None:
        self.directory = ControllerDirectory("nobody:1")
        self.tables: list[Views] = []
        self.listeners.append(self.tables.append)

    @property
    def listeners(self) -> list[Callable[[Views], None]]:
        return self.directory._listeners

    def take(self, message: ClusterView) -> dict[str, WorkerView]:
        take(self.directory, message)
        return {view.record.name: view for view in self.tables[-1]}


def test_a_whole_table_takes_the_place_of_the_one_before_and_changes_are_put_into_it() -> None:
    heard = Heard()
    assert heard.take(table(row(A), row(B))) == {A: row(A), B: row(B)}
    assert heard.take(table(row(C), changes=True)) == {A: row(A), B: row(B), C: row(C)}
    assert heard.take(table(row(B, incarnation=2), changes=True))[B] == row(B, incarnation=2)
    assert heard.take(table(row(B), row(C))) == {B: row(B), C: row(C)}, "who isn't in the whole table is gone"
    assert heard.take(table()) == {}


def test_numbers_are_of_the_worker_that_they_name_and_leave_the_rest_of_its_row() -> None:
    heard = Heard()
    cordoned = replace(row(B), cordoned=True)
    heard.take(table(row(A), cordoned))
    told = heard.take(table(changes=True, numbers=(row(B, running=7).status, row(C, running=9).status)))
    assert told == {A: row(A), B: replace(cordoned, status=row(B, running=7).status)}
    assert C not in told, "numbers of a worker whose row has not come say nothing"


def test_counters_that_a_status_leaves_out_are_those_that_were_said_last_of_this_worker() -> None:
    heard = Heard()
    heard.take(table(row(A, steps=1.0), row(B, steps=2.0)))
    quiet = replace(row(B, running=5).status, counters={}, counters_left_out=True)
    told = heard.take(table(changes=True, numbers=(quiet,)))
    assert told[B].status == replace(row(B, running=5).status, counters={"steps": 2.0})
    told = heard.take(table(changes=True, numbers=(quiet, row(A, steps=3.0).status)))
    assert (told[A].status.counters, told[B].status.counters) == ({"steps": 3.0}, {"steps": 2.0})
    told = heard.take(table(changes=True, numbers=(replace(quiet, counters_left_out=False),)))
    assert told[B].status.counters == {}, "a worker that says that it has none has none"


def test_a_question_is_passed_on_and_is_no_news_of_workers() -> None:
    heard, asked = Heard(), list[tuple[int, str]]()
    heard.take(table(row(A)))
    ask = (RecordAsk(5, "r"),)
    heard.take(table(changes=True, record_asks=ask))
    heard.directory.on_record_ask(lambda number, request_id: asked.append((number, request_id)))
    heard.take(table(changes=True, record_asks=ask))
    assert asked == [(5, "r")]
    assert len(heard.tables) == 1
    assert heard.take(table(row(A, running=3), changes=True, record_asks=ask)) == {A: row(A, running=3)}
    assert len(asked) == 2


def test_who_leads_stays_known_while_nobody_says_otherwise_and_a_controller_alone_is_none() -> None:
    """A controller that keeps its own ledger tells no leader, and one of an older build nothing at all."""
    heard = Heard()
    heard.take(table(row(A)))
    assert heard.directory.control_plane() is None
    heard.take(table(changes=True, control_plane=ControlPlane("h:1", 4, ("h:2",))))
    assert heard.directory.control_plane() == ControlPlane("h:1", 4, ("h:2",), away=True)
    heard.take(table(changes=True))
    assert heard.directory.control_plane() == ControlPlane("h:1", 4, ("h:2",), away=True)
    heard.take(table(changes=True, control_plane=ControlPlane("", 0, ())))
    assert heard.directory.control_plane() is None


def test_adapters_stay_while_nothing_is_said_of_them_and_the_last_one_may_go() -> None:
    heard, told = Heard(), list[tuple[AdapterRef, ...]]()
    one = AdapterRef("a", "digest", "/a")
    for view in (table(row(A), adapters=(one,)), table(row(B), changes=True), table(changes=True, adapters=())):
        heard.take(view)
        told.append(heard.directory.adapters)
    assert told == [(one,), (one,), ()]


def test_a_listener_that_fails_costs_no_other_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    others: list[Views] = []

    def fail(views: Views) -> None:
        raise ZeroDivisionError

    heard.listeners[:0] = [fail]
    heard.listeners.append(others.append)
    heard.take(table(row(A)))
    heard.take(table(row(A), row(B)))
    assert [len(views) for views in others] == [1, 2]


@pytest.mark.asyncio
async def test_who_comes_later_gets_the_table_at_once_and_the_last_to_go_ends_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = ControllerDirectory("127.0.0.1:1")
    first, second = list[Views](), list[Views]()
    unwatch = directory.watch(first.append)
    take(directory, table(row(A)))
    unwatch_second = directory.watch(second.append)
    assert first == second == [(row(A),)]
    unwatch()
    unwatch()
    take(directory, table(row(B)))
    assert (len(first), len(second)) == (1, 2)
    following = directory._task
    assert following is not None
    unwatch_second()
    await asyncio.gather(following, return_exceptions=True)
    assert following.cancelled()
    assert directory._task is None


@pytest.mark.asyncio
async def test_a_watch_that_breaks_is_begun_anew_ever_more_seldom_and_nothing_is_asked_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table stands while the controller is away: nobody is gone because nobody reports it."""
    pauses: list[float] = []
    comes, turns = [False, False, False, True, False], asyncio.Event()

    class Channel:
        async def __aenter__(self) -> Channel:
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def subscribe(self, method: object, request: WatchRequest, **options: Any) -> Any:
            assert method is WATCH
            assert request.changes
            if not comes.pop(0):
                raise ValueError("planted")
            yield table(row(A))
            assert directory.reachable()

    async def sleep(seconds: float) -> None:
        assert not directory.reachable()
        with pytest.raises(ConnectionError, match="away"):
            await directory.find_records("r")
        pauses.append(seconds)
        if not comes:
            turns.set()
            await asyncio.Event().wait()

    directory = ControllerDirectory("nobody:1")
    real, tables = asyncio.sleep, list[Views]()
    monkeypatch.setattr(ControllerDirectory, "_channel", lambda self, endpoint: Channel())
    monkeypatch.setattr("twinpool.router.links.controller_directory.asyncio.sleep", sleep)
    unwatch = directory.watch(tables.append)
    await asyncio.wait_for(turns.wait(), 60)
    monkeypatch.setattr("twinpool.router.links.controller_directory.asyncio.sleep", real)
    first = ControllerDirectory.RETRY_FIRST_S
    assert pauses == [first, 2 * first, 4 * first, first, 2 * first]
    assert tables == [(row(A),)]
    unwatch()
