"""The router's open links: one session to every worker that the controller's table shows as alive.

A link is retried as long as the table shows that incarnation; the router core decides what a link's end means.

A link's stream (`WorkerStream`) is one connection: commands go out, events come in. What a turn of the loop sends goes
out together at its end, and more than `TURN_BYTES` of it in the turns after it: 128 choices of a long prompt take a
tenth of a second to encode. The worker's frames carry its incarnation back.

The client of a worker (`GrpcWorkerClient`) speaks to one incarnation of it. Every call carries that incarnation as
metadata and the worker refuses any other, so a restarted worker on the same address is never taken for its predecessor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from twinpool.contracts.cluster_secret import access_token, cluster_secret
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.calls import (
    CHECK_WORKER,
    DRAIN_WORKER,
    UNDRAIN_WORKER,
    WORKER_STATUS,
    Call,
    Empty,
)
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd, StreamOpening, refusal
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed
from twinpool.contracts.wire.message_codec import EVENTS_BYTES, FrameWriter, decode_events, encode_opening
from twinpool.router.links.controller_port import WorkerClient, WorkerDirectory, WorkerSession
from twinpool.router.state.worker_table import WorkerKey

MAX_COMMANDS = 64 * 1024
"""Commands that may wait for a worker that doesn't read, before its stream is ended."""


TURN_BYTES = 1024 * 1024
"""Bytes of frames that are made and sent in one turn of the loop; the last frame may go beyond."""


class WorkerStream:
    """The open stream to one worker."""

    def __init__(
        self,
        connection: FrameConnection,
        incarnation: Incarnation,
        on_events: Callable[[Sequence[Event]], None],
        on_closed: Callable[[StreamEnd], None],
    ) -> None:
        self._connection = connection
        self._incarnation = incarnation
        self._on_events = on_events
        self._on_closed: Callable[[StreamEnd], None] | None = on_closed
        self._queue: list[Command] = []
        self._writer = FrameWriter()
        self._frames: Iterator[bytes] = iter(())
        """The frames of commands that were taken from the queue, each made when it is sent."""
        self._due = False
        """Whether the queue is to be sent at the end of this turn of the loop."""
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        """Done when the worker has admitted this router."""
        connection.max_bytes = EVENTS_BYTES
        connection.on_frame, connection.on_end, connection.on_flow = self._frame, self._broken, self._flush

    def send(self, commands: Sequence[Command]) -> None:
        if self._on_closed is None:
            return
        self._queue.extend(commands)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """End the stream without a call of `on_closed`. Idempotent."""
        self._on_closed = None
        self._queue.clear()
        self._frames = iter(())
        self._connection.abort()

    def _flush(self) -> None:
        self._due = False
        # What a worker doesn't read waits as commands, which cost nothing twice.
        if len(self._queue) > MAX_COMMANDS and not self._connection.flows:
            self._broken(f"it doesn't read its commands: {len(self._queue)} wait for it")
            return
        sent = 0
        while self._connection.flows and sent < TURN_BYTES:
            frame = self._next_frame()
            if frame is None:
                return
            self._connection.send(frame)
            sent += len(frame)
        if self._connection.flows:
            self._flush_soon()

    def _next_frame(self) -> bytes | None:
        frame = next(self._frames, None)
        if frame is None and self._queue:
            batch, self._queue = self._queue, []
            self._frames = self._writer.frames(batch)
            frame = next(self._frames, None)
        return frame

    def _broken(self, reason: str) -> None:
        self._ended(StreamEnd(reason))

    def _ended(self, end: StreamEnd) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(end.reason))
            self.close()
        on_closed = self._on_closed
        self.close()
        if on_closed is not None:
            on_closed(end)

    def _frame(self, raw: bytes) -> None:
        try:
            frame, others = decode_events(raw)
            if frame.end is not None:
                self._ended(frame.end)
                return
            if frame.incarnation != self._incarnation:
                raise WireError(f"a frame of incarnation {frame.incarnation} came on {self._incarnation}'s stream")
        except WireError as error:
            self._broken(f"a frame that can't be read: {error}")
            return
        if not self.opened.done():
            self.opened.set_result(None)
        if others:
            log("unknown events", incarnation=self._incarnation, left_out=others)
        if not frame.events:
            return
        try:
            self._on_events(frame.events)
        except Exception as error:  # our own bug: a stream that nobody reads would hang its requests
            log("events failed", level=logging.ERROR, trace=True)
            self._broken(f"the router failed on an event: {error!r}")


async def open_stream(
    record: WorkerRecord,
    silence_s: float,
    tls: NodeTls | None,
    on_events: Callable[[Sequence[Event]], None],
    on_closed: Callable[[StreamEnd], None],
    *,
    timeout_s: float,
) -> WorkerStream:
    """Open the stream to a worker; `silence_s`: seconds after which a worker that says nothing counts as gone.

    Raises `ConnectionError` where the worker can't be reached, is too old for this build, refuses, or hasn't answered
    after `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    host, _, port = record.stream.rpartition(":")
    connection = FrameConnection(silence_s)
    stream = WorkerStream(connection, record.incarnation, on_events, on_closed)
    if too_old := refusal(record.name, record.stream_protocol, record.build):
        raise ConnectionError(too_old)
    access = access_token(cluster_secret())
    opening = StreamOpening(STREAM_PROTOCOL, record.incarnation, access)
    context, name = (tls.client(), NODE_NAME) if tls is not None else (None, None)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: connection, host, int(port), ssl=context, server_hostname=name)
            connection.send(encode_opening(opening))
            await stream.opened
    except TimeoutError:
        stream.close()
        raise ConnectionError(f"{record.name} at {record.stream} didn't answer in {timeout_s} s") from None
    except (OSError, ValueError) as error:  # `ssl.SSLError` and `ConnectionError` are OSErrors.
        stream.close()
        raise ConnectionError(f"{record.name} at {record.stream}: {error}") from None
    except asyncio.CancelledError:
        stream.close()
        raise
    return stream


RETRY_FIRST_S = 0.05
MAX_RETRY_S = 2.0
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
                session = await link.port.connect(partial(self._on_events, key), closed)
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
            pause = min(pause * 2, MAX_RETRY_S)


INCARNATION_KEY = "twinpool-incarnation"
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 10.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s
AnswerT = TypeVar("AnswerT")


class GrpcWorkerClient:
    """The client of one incarnation of one worker, at ``record.endpoint``.

    Calls raise `ConnectionError` when they fail or aren't answered in time.
    """

    def __init__(
        self,
        record: WorkerRecord,
        link_timeout_s: float = LINK_TIMEOUT_S,
        certificate: CertificateFiles | None = None,
    ) -> None:
        """`certificate`: this node's, None where calls go without TLS. Raises `ConfigError` where it can't be read."""
        self._record = record
        self._link_timeout_s, self._certificate = link_timeout_s, certificate
        self._tls = NodeTls(certificate) if certificate is not None else None
        self._open()

    def _open(self) -> None:
        self._stamp = self._certificate.stamp() if self._certificate is not None else ()
        self._channel = CallChannel(
            self._record.endpoint,
            cluster_secret(),
            self._certificate,
            silence_s=self._link_timeout_s,
            metadata=((INCARNATION_KEY, str(self._record.incarnation)),),
        )

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> WorkerStream:
        if self._certificate is not None and self._stamp != self._certificate.stamp():
            before = self._channel  # It would go on with the certificate of its start.
            self._open()
            await before.close(CONNECT_TIMEOUT_S)  # After the calls that are under way.
        return await open_stream(
            self._record, self._link_timeout_s, self._tls, on_events, on_closed, timeout_s=CONNECT_TIMEOUT_S
        )

    async def status(self) -> WorkerStatus:
        return await self._ask(WORKER_STATUS, STATUS_TIMEOUT_S)

    async def check(self) -> CheckReport:
        return await self._ask(CHECK_WORKER, CHECK_TIMEOUT_S)

    async def drain(self) -> WorkerStatus:
        return await self._ask(DRAIN_WORKER, CONNECT_TIMEOUT_S)

    async def undrain(self) -> WorkerStatus:
        return await self._ask(UNDRAIN_WORKER, CONNECT_TIMEOUT_S)

    async def aclose(self) -> None:
        await self._channel.close()

    async def _ask(self, call: Call[Empty, AnswerT], timeout_s: float) -> AnswerT:
        """Make one call; raises `ConnectionError`, with the reason, when it fails or isn't answered in `timeout_s`."""
        try:
            return await self._channel.call(call, Empty(), timeout_s)
        except CallFailed as error:
            raise ConnectionError(f"{self._record.name}: {error}") from None
