"""The router's end of the stream to a worker: commands out, events in, on one connection.

What a turn of the loop sends goes out together at its end, and more than `TURN_BYTES` of it in the turns after it:
128 choices of a long prompt take a tenth of a second to encode. The worker's frames carry its incarnation back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from twinpool.contracts.cluster_secret import access_token, cluster_secret
from twinpool.contracts.credentials.certificate_files import NODE_NAME
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd, StreamOpening
from twinpool.contracts.messages.stream_protocol import STREAM_PROTOCOL, refusal
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerRecord
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.stream_codec import EVENTS_BYTES, FrameWriter, decode_events, encode_opening
from twinpool.router.state.router_log import log

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
