"""The router's open links: one session to every worker that the controller's table shows as alive.

A link is retried as long as the table shows that incarnation; the router core decides what a link's end means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from twinpool.contracts.interfaces.discovery import WorkerClient, WorkerDirectory, WorkerSession
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView
from twinpool.router.state.router_log import log
from twinpool.router.state.worker_table import WorkerKey

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
REACHABLE = frozenset({"ready", "draining"})
"""States of workers that get a link."""


class WorkerLink:
    """The link to one incarnation of a worker: its client, the session while connected, the task that reconnects it."""

    __slots__ = ("port", "record", "refused", "session", "task")

    def __init__(self, record: WorkerRecord, port: WorkerClient) -> None:
        self.record = record
        self.port = port
        self.session: WorkerSession | None = None
        self.refused = ""
        """Why the latest try to connect failed; empty while it is connected, or hasn't been tried."""
        self.task: asyncio.Task[None] | None = None


class WorkerLinks:
    """The links of one router, kept in step with the directory; used from one event loop."""

    def __init__(
        self,
        directory: WorkerDirectory,
        *,
        on_view: Callable[[tuple[WorkerView, ...]], None],
        on_linked: Callable[[WorkerKey], None],
        on_unlinked: Callable[[WorkerKey, StreamEnd], None],
        on_events: Callable[[WorkerKey, Sequence[Event]], None],
    ) -> None:
        self.directory = directory
        self._on_view = on_view
        self._on_linked = on_linked
        self._on_unlinked = on_unlinked
        self._on_events = on_events
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unwatch: Callable[[], None] | None = None
        self.views: tuple[WorkerView, ...] = ()
        self.known = False
        """Whether the controller's table has arrived since the start: before, empty `views` don't mean no workers."""

    def start(self) -> None:
        self._unwatch = self.directory.watch(self._changed)

    async def close(self) -> None:
        """End every link, and wait until the clients are closed. Idempotent."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        for key in list(self._links):
            self._drop(key)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def send(self, key: WorkerKey, commands: Sequence[Command]) -> None:
        """Queue commands on a link. On a link that has just closed they are dropped, as the router core hears of it."""
        link = self._links.get(key)
        if link is not None and link.session is not None:
            link.session.send(commands)

    def port(self, key: WorkerKey) -> WorkerClient | None:
        """The client of this incarnation; None where it has no link."""
        link = self._links.get(key)
        return link.port if link is not None else None

    @property
    def missing(self) -> int:
        """How many workers that the controller's table shows as alive have no link."""
        return len([link for link in self._links.values() if link.session is None])

    def refused(self, key: WorkerKey) -> str:
        """Why this incarnation has no link, in words; empty where it has one, or none was tried."""
        link = self._links.get(key)
        return link.refused if link is not None else ""

    def _changed(self, views: tuple[WorkerView, ...]) -> None:
        self.views, self.known = views, True
        wanted = {(v.record.name, v.record.incarnation): v.record for v in views if v.status.state in REACHABLE}
        left = {(v.record.name, v.record.incarnation) for v in views if v.status.state == "left"}
        for key in [k for k in self._links if k not in wanted]:
            self._drop(key, left=key in left)
        self._on_view(views)
        for key, record in wanted.items():
            if key not in self._links:
                link = self._links[key] = WorkerLink(record, self.directory.port(record))
                link.task = asyncio.get_running_loop().create_task(self._keep(key, link))

    def _drop(self, key: WorkerKey, *, left: bool = False) -> None:
        link = self._links.pop(key)
        if link.session is not None:
            link.session.close()
            link.session = None
            self._on_unlinked(key, StreamEnd("the controller no longer shows it as alive", left))
        if link.task is not None:
            link.task.cancel()
        task = asyncio.get_running_loop().create_task(link.port.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _keep(self, key: WorkerKey, link: WorkerLink) -> None:
        """Keep one link: connect, wait for the stream's end, and connect again after a pause that doubles."""
        pause = RETRY_FIRST_S
        while self._links.get(key) is link:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def closed(end: StreamEnd, ended: asyncio.Future[None] = ended) -> None:
                if link.session is not None:
                    link.session = None
                    log("link closed", worker=key[0], incarnation=key[1], reason=end.reason)
                    self._on_unlinked(key, end)
                if not ended.done():
                    ended.set_result(None)

            try:
                session = await link.port.connect(lambda events: self._on_events(key, events), closed)
            except (OSError, TimeoutError) as error:  # ConnectionError is an OSError
                link.refused = str(error)
                log("link refused", worker=key[0], incarnation=key[1], reason=str(error))
            except Exception:  # our own bug: try again rather than lose the worker
                log("link failed", level=logging.ERROR, trace=True, worker=key[0], incarnation=key[1])
            else:
                if not ended.done():
                    link.session, link.refused = session, ""
                    pause = RETRY_FIRST_S
                    log("link open", worker=key[0], incarnation=key[1])
                    self._on_linked(key)
                    await ended
            await asyncio.sleep(pause)
            pause = min(pause * 2, RETRY_MOST_S)
