"""Workers and the controller over gRPC: `contracts.ports` between processes.

A port speaks to one incarnation of one worker. Every call carries the incarnation it means as metadata and the
worker refuses another, so a restarted worker on the same address is never taken for its predecessor; frames carry it
back. The stream is opened after a status call has answered: a stream alone would not tell a dead address in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from contracts import channels
from contracts.access import access_metadata, cluster_secret
from contracts.channels import COMMANDS_BYTES, CONTROL_BYTES, EVENTS_BYTES, TABLE_BYTES
from contracts.config import TransferConfig
from contracts.errors import RequestError, WireError
from contracts.frames import FrameWriter
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import CheckReport, Command, Event, Fits, WorkerStatus
from contracts.ports import Port, WorkerRecord, WorkerView
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire import (
    event_from_proto,
    fingerprint_from_proto,
    known,
    report_from_proto,
    role_from_proto,
    status_from_proto,
)
from router.log import log

INCARNATION_KEY = "twinpool-incarnation"
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 10.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s
SERVE = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/Serve"
"""Called by name, as its frames are bytes already."""


def channel_options(link_timeout_s: float) -> list[tuple[str, int]]:
    """Options of a channel to a worker: a host that vanishes says nothing, and its silence is noticed."""
    return channels.channel_options(COMMANDS_BYTES, EVENTS_BYTES, link_timeout_s)


def controller_options(link_timeout_s: float) -> list[tuple[str, int]]:
    """Options of a channel to the controller."""
    return channels.channel_options(CONTROL_BYTES, TABLE_BYTES, link_timeout_s)


class GrpcSession:
    """The open stream to one worker: a reader and a writer task around one gRPC call."""

    def __init__(
        self,
        call: Any,
        incarnation: Incarnation,
        on_events: Callable[[Sequence[Event]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._call = call
        self._incarnation = incarnation
        self._on_events = on_events
        self._on_closed: Callable[[str], None] | None = on_closed
        self._queue: list[Command] = []
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._write())]

    def send(self, commands: Sequence[Command]) -> None:
        if self._on_closed is not None:
            self._queue.extend(commands)
            self._wake.set()

    def close(self) -> None:
        """End the stream without a call of `on_closed`. Idempotent."""
        self._on_closed = None
        self._end()

    def _end(self) -> None:
        self._queue.clear()
        self._call.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _broken(self, reason: str) -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            self._end()
            on_closed(reason)

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                if frame.incarnation != self._incarnation:
                    raise WireError(f"a frame of incarnation {frame.incarnation} came on {self._incarnation}'s stream")
                events, others = known(event_from_proto, frame.events)
                if others:
                    log("unknown events", incarnation=self._incarnation, left_out=others)
                if events and self._on_closed is not None:
                    self._on_events(events)
        except grpc.aio.AioRpcError as error:
            self._broken(f"{error.code().name}: {error.details()}")
        except (WireError, ValueError) as error:
            self._broken(f"a frame that can't be read: {error}")
        except Exception as error:  # our own bug: a stream that nobody reads would hang its requests
            log("events failed", level=logging.ERROR, trace=True)
            self._broken(f"the router failed on an event: {error!r}")
        else:
            self._broken("the worker closed the stream")

    async def _write(self) -> None:
        writer = FrameWriter()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    batch, self._queue = self._queue, []
                    for frame in writer.frames(batch):
                        await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            self._broken(f"{error.code().name}: {error.details()}")
        except (asyncio.InvalidStateError, ValueError) as error:
            self._broken(f"the stream can't be written: {error}")


class GrpcPort:
    """One incarnation of one worker, at ``record.endpoint``."""

    def __init__(self, record: WorkerRecord, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        self._record = record
        self._metadata = ((INCARNATION_KEY, str(record.incarnation)), *access_metadata(cluster_secret()))
        self._channel = grpc.aio.insecure_channel(record.endpoint, options=channel_options(link_timeout_s))
        self._stub: Any = pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[str], None]
    ) -> GrpcSession:
        status = await self._ask(self._stub.Status, CONNECT_TIMEOUT_S)
        if status.incarnation != self._record.incarnation:
            raise ConnectionError(
                f"{self._record.name} at {self._record.endpoint} is incarnation {status.incarnation}, "
                f"not {self._record.incarnation}"
            )
        serve: Any = self._channel.stream_stream(SERVE, None, pb.WorkerFrame.FromString)
        call = serve(metadata=self._metadata)
        return GrpcSession(call, self._record.incarnation, on_events, on_closed)

    async def status(self) -> WorkerStatus:
        return status_from_proto(await self._ask(self._stub.Status, STATUS_TIMEOUT_S))

    async def check(self) -> CheckReport:
        return report_from_proto(await self._ask(self._stub.Check, CHECK_TIMEOUT_S))

    async def drain(self) -> WorkerStatus:
        return status_from_proto(await self._ask(self._stub.Drain, CONNECT_TIMEOUT_S))

    async def undrain(self) -> WorkerStatus:
        return status_from_proto(await self._ask(self._stub.Undrain, CONNECT_TIMEOUT_S))

    async def aclose(self) -> None:
        await self._channel.close(None)

    async def _ask(self, method: Any, timeout_s: float) -> Any:
        """One call; raises `ConnectionError` with the reason when it isn't answered in time."""
        try:
            return await method(pb.Empty(), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{self._record.name}: {error.code().name}: {error.details()}") from None
        except grpc.aio.UsageError as error:
            raise ConnectionError(f"{self._record.name}: {error}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not whoever asks was cancelled, but the call: the channel was closed, as the worker is gone.
            raise ConnectionError(f"{self._record.name}: its connection was closed in mid-call") from None


class ControllerDirectory:
    """The controller's table over its `Watch` stream, followed again whenever the stream breaks.

    While the controller is away the last table stands: workers don't vanish because nobody reports them; their own
    streams tell when they do.
    """

    RETRY_FIRST_S = 0.05
    RETRY_MOST_S = 1.0

    def __init__(self, target: str, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        """`link_timeout_s`: silence after which a connection counts as cut (`transfer.link_timeout_s`)."""
        self._target = target
        self._link_timeout_s = link_timeout_s
        self._listeners: list[Callable[[tuple[WorkerView, ...]], None]] = []
        self._views: tuple[WorkerView, ...] | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        self._listeners.append(on_change)
        if self._views is not None:
            on_change(self._views)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

        def unwatch() -> None:
            if on_change in self._listeners:
                self._listeners.remove(on_change)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

        return unwatch

    def port(self, record: WorkerRecord) -> Port:
        return GrpcPort(record, self._link_timeout_s)

    async def change_role(self, name: WorkerName, role: Role) -> None:
        """Raises `RequestError` where the controller refuses, `ConnectionError` where it doesn't answer."""
        await self._ask("ChangeRole", pb.RoleChange(name=name, role=role))

    async def drain(self, target: str) -> tuple[WorkerName, ...]:
        answer = await self._ask("Drain", pb.Target(name=target))
        return tuple(WorkerName(name) for name in answer.workers)

    async def undrain(self, target: str) -> tuple[WorkerName, ...]:
        answer = await self._ask("Undrain", pb.Target(name=target))
        return tuple(WorkerName(name) for name in answer.workers)

    async def _ask(self, method: str, request: Any) -> Any:
        """One call of the controller, on a connection of its own."""
        metadata = access_metadata(cluster_secret())
        options = controller_options(self._link_timeout_s)
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            stub: Any = pb_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
            try:
                return await getattr(stub, method)(request, timeout=CONNECT_TIMEOUT_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise RequestError(error.details() or "the controller refuses") from None
                raise ConnectionError(f"{error.code().name}: {error.details()}") from None

    def _tell(self, views: tuple[WorkerView, ...]) -> None:
        for listener in list(self._listeners):
            try:
                listener(views)
            except Exception:  # our own bug: the next table may mend it, and nobody else can
                log("view failed", level=logging.ERROR, trace=True)

    async def _follow(self) -> None:
        pause = self.RETRY_FIRST_S
        metadata = access_metadata(cluster_secret())
        async with grpc.aio.insecure_channel(self._target, options=controller_options(self._link_timeout_s)) as channel:
            stub: Any = pb_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
            while True:
                try:
                    async for view in stub.Watch(pb.Empty(), wait_for_ready=True, metadata=metadata):
                        pause = self.RETRY_FIRST_S
                        views, others = known(view_from_proto, view.workers)
                        if others:
                            log("unknown roles", left_out=others)
                        self._views = tuple(views)
                        self._tell(self._views)
                    reason = "the controller closed the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                except ValueError as error:
                    reason = f"a view that can't be read: {error}"
                log("controller lost", target=self._target, reason=reason)
                await asyncio.sleep(pause)
                pause = min(pause * 2, self.RETRY_MOST_S)


def view_from_proto(m: pb.WorkerView) -> WorkerView:
    """A row of the controller's table. Raises `UnknownKind` for a role that this build doesn't know."""
    r = m.registration
    incarnation = Incarnation(m.status.incarnation or r.incarnation)
    record = WorkerRecord(
        name=WorkerName(r.name),
        role=role_from_proto(r.role),
        incarnation=incarnation,
        pid=r.pid,
        node=r.node,
        endpoint=r.endpoint,
        control=r.control,
        fits=Fits(r.max_positions, r.context),
        node_id=r.node_id,
        fingerprint=fingerprint_from_proto(r.fingerprint) if r.HasField("fingerprint") else None,
    )
    status = status_from_proto(m.status) if m.status.name else None
    if status is None:
        status = WorkerStatus(record.name, record.role, "starting", record.pid, record.node, incarnation, 0, 0, 0, 0)
    return WorkerView(record, status, m.cordoned)
