"""The links of one router by themselves: who gets one, when it is tried again, and who hears of its end and how."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.wire.instances import full
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_commands import Cancel, Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.links import worker_links
from twinpool.router.links.worker_links import MAX_RETRY_S, RETRY_FIRST_S, WorkerLinks
from twinpool.router.state.worker_table import WorkerKey

A, B = WorkerName("decode-0"), WorkerName("decode-1")


def view(name: WorkerName = A, state: str = "ready", incarnation: int = 1) -> WorkerView:
    number = Incarnation(incarnation)
    record = replace(full(WorkerRecord), name=name, role=Role.DECODE, incarnation=number)
    status = replace(full(WorkerStatus), name=name, role=Role.DECODE, incarnation=number, state=state)
    return WorkerView(record, status)


class Session:
    """A session that keeps what is sent."""

    def __init__(self, on_closed: Callable[[StreamEnd], None]) -> None:
        self.on_closed = on_closed
        self.sent: list[Command] = []
        self.closed = False

    def send(self, commands: Sequence[Command]) -> None:
        assert not self.closed
        self.sent += commands

    def close(self) -> None:
        self.closed = True


class Client:
    """A client whose tries to connect go as the test says: an error is raised, and None opens a session."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.tries: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.waiting = 0
        self.sessions: list[Session] = []
        self.aclosed = False

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> Session:
        self.waiting += 1
        try:
            outcome = await self.tries.get()
        finally:
            self.waiting -= 1
        if outcome is not None:
            raise outcome
        self.sessions.append(Session(on_closed))
        return self.sessions[-1]

    async def aclose(self) -> None:
        self.aclosed = True


class Site:
    """Links, their directory, and what the router core hears of them; pauses pass at once, and are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.clients: list[Client] = []
        self.pauses: list[float] = []
        self.unwatched = False
        self.tell: Callable[[tuple[WorkerView, ...]], None] = lambda views: None

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        kept = {name: getattr(asyncio, name) for name in ("get_running_loop", "gather")}
        monkeypatch.setattr(worker_links, "asyncio", types.SimpleNamespace(sleep=sleep, **kept))
        directory: Any = self
        self.links = WorkerLinks(
            directory,
            on_view=lambda views: self.heard.append(("view", len(views))),
            on_linked=lambda key: self.heard.append(("linked", key)),
            on_unlinked=lambda key, end: self.heard.append(("unlinked", (key, end.left))),
            on_events=lambda key, events: self.heard.append(("events", key)),
        )
        self.links.start()

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        self.tell = on_change
        return lambda: setattr(self, "unwatched", True)

    def port(self, record: WorkerRecord) -> Client:
        self.clients.append(Client(record))
        return self.clients[-1]

    async def goes(self, *outcomes: Exception | None) -> None:
        """Have the latest client's next tries go so."""
        for outcome in outcomes:
            self.clients[-1].tries.put_nowait(outcome)
        await settle()

    def of(self, kind: str) -> list[Any]:
        return [what for said, what in self.heard if said == kind]


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def key(name: WorkerName = A, incarnation: int = 1) -> WorkerKey:
    return name, Incarnation(incarnation)


CANCEL: Any = full(Cancel)


@pytest.mark.asyncio
async def test_a_worker_that_refuses_is_tried_again_ever_more_seldom_and_as_at_first_once_it_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch)
    site.tell((view(),))
    refusals = 8
    await site.goes(*(ConnectionError(f"no {number}") for number in range(refusals)))
    assert site.links.refused(key()) == f"no {refusals - 1}"
    assert site.links.missing == 1
    doubled = [min(RETRY_FIRST_S * 2**number, MAX_RETRY_S) for number in range(refusals)]
    assert site.pauses == doubled
    assert doubled[-1] == MAX_RETRY_S
    site.links.send(key(), [CANCEL])  # Nobody is there to hear it, and the core knows.
    await site.goes(None)
    assert site.of("linked") == [key()]
    assert (site.links.missing, site.links.refused(key())) == (0, "")
    session = site.clients[0].sessions[0]
    site.links.send(key(), [CANCEL])
    assert session.sent == [CANCEL]
    site.pauses.clear()
    session.on_closed(StreamEnd("cut"))
    await settle()
    assert site.of("unlinked") == [(key(), False)]
    assert site.links.missing == 1
    site.links.send(key(), [CANCEL])
    assert session.sent == [CANCEL]
    await site.goes(ConnectionError("again"), TimeoutError("late"), ZeroDivisionError("our own bug"), None)
    assert site.pauses == [RETRY_FIRST_S, *(RETRY_FIRST_S * 2**n for n in range(1, 4))]
    assert site.of("linked") == [key(), key()], "whatever a try ends in, the next one is made"
    assert len(site.clients) == 1
    await site.links.close()
    assert site.clients[0].aclosed
    assert site.unwatched


@pytest.mark.asyncio
@pytest.mark.parametrize(("state", "left"), [("left", True), ("dead", False), ("starting", False), (None, False)])
async def test_who_the_table_shows_as_gone_is_unlinked_before_the_table_is_told_and_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch, state: str | None, left: bool
) -> None:
    """One that has left in order has handed over what it began; of one that is lost nothing is known."""
    site = Site(monkeypatch)
    site.tell((view(A), view(B)))
    for client in site.clients:
        client.tries.put_nowait(None)
    await settle()
    assert sorted(site.of("linked")) == [key(A), key(B)]
    site.heard.clear()
    site.tell((view(A, state), view(B)) if state else (view(B),))
    assert site.heard == [("unlinked", (key(A), left)), ("view", 2 if state else 1)]
    first, second = site.clients
    assert first.sessions[0].closed
    first.sessions[0].on_closed(StreamEnd("late"))
    await settle()
    assert site.of("unlinked") == [(key(A), left)], "once"
    assert first.aclosed
    assert not second.aclosed
    assert not second.sessions[0].closed
    assert (site.links.port(key(A)), site.links.missing) == (None, 0)
    await site.links.close()
    await site.links.close()
    assert site.of("unlinked") == [(key(A), left), (key(B), False)]


@pytest.mark.asyncio
async def test_each_incarnation_has_a_link_of_its_own_and_draining_ones_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch)
    site.tell((view(state="starting"),))
    assert site.clients == [], "nobody is there yet"
    site.tell((view(),))
    await site.goes(None)
    site.tell((view(state="draining"),))
    assert site.of("unlinked") == []
    assert len(site.clients) == 1, "it is tried for as long as it is the same"
    site.tell((view(incarnation=2),))
    await settle()
    assert site.of("unlinked") == [(key(), False)]
    assert site.clients[0].aclosed
    await site.goes(None)
    assert site.of("linked") == [key(), key(incarnation=2)]
    assert site.clients[1].record.incarnation == 2
    site.links.send(key(), [CANCEL])
    assert site.clients[1].sessions[0].sent == [], "what is for the one before is for nobody"
    await site.links.close()


@pytest.mark.asyncio
async def test_a_worker_that_is_gone_while_it_is_connected_to_is_not_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)
    site.tell((view(),))
    await settle()
    assert site.clients[0].waiting == 1
    site.tell(())
    await settle()
    assert site.clients[0].waiting == 0
    assert site.clients[0].aclosed
    assert site.of("linked") == site.of("unlinked") == []
    assert not site.links.views
    assert site.links.known
    await site.links.close()


@pytest.mark.asyncio
async def test_a_stream_that_ends_before_its_opening_is_told_is_not_taken_for_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker's first frame and the end of its stream come in one turn of the loop."""
    site = Site(monkeypatch)
    site.tell((view(),))
    await settle()
    client = site.clients[0]
    connect = client.connect

    async def cut_at_once(on_events: Any, on_closed: Callable[[StreamEnd], None]) -> Session:
        session = await connect(on_events, on_closed)
        on_closed(StreamEnd("cut"))
        return session

    await site.goes(ConnectionError("not yet"))
    client.connect = cut_at_once  # type: ignore[method-assign]
    await site.goes(ConnectionError("not yet"), None)
    assert (site.of("linked"), site.links.missing) == ([], 1), "nobody would ever be told of its end"
    client.connect = connect  # type: ignore[method-assign]
    await site.goes(None, None)
    assert (site.of("linked"), site.links.missing) == ([key()], 0)
    await site.links.close()
