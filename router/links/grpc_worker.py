"""The client of a worker over gRPC: `contracts.interfaces.discovery` between processes.

A client speaks to one incarnation of one worker. Every call carries that incarnation as metadata and the worker
refuses any other, so a restarted worker on the same address is never taken for its predecessor; the worker's frames
carry it back. The stream is opened after a status call has answered: a stream alone would not tell a dead address in
time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from contracts.cluster_secret import access_metadata, cluster_secret
from contracts.config.worker_config import TransferConfig
from contracts.credentials.certificate_files import CertificateFiles
from contracts.errors import WireError
from contracts.ids import Incarnation
from contracts.messages.router_commands import Command
from contracts.messages.worker_events import Event
from contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire import grpc_channels as channels
from contracts.wire.event_protobuf import event_from_proto
from contracts.wire.grpc_channels import COMMANDS_BYTES, CONTROL_BYTES, EVENTS_BYTES, TABLE_BYTES
from contracts.wire.secure_grpc import open_channel
from contracts.wire.shared_frames import FrameWriter
from contracts.wire.unknown_kinds import known
from contracts.wire.worker_protobuf import report_from_proto, status_from_proto
from router.state.router_log import log

INCARNATION_KEY = "twinpool-incarnation"
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 10.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s
SERVE = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/Serve"
"""The full name of the stream's method, called by name as the frames to send are bytes already."""


def channel_options(link_timeout_s: float) -> list[tuple[str, int]]:
    """Options of a channel to a worker: a host that vanishes says nothing, and is noticed after `link_timeout_s`."""
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
        self._metadata = ((INCARNATION_KEY, str(record.incarnation)), *access_metadata(cluster_secret()))
        self._link_timeout_s, self._certificate = link_timeout_s, certificate
        self._open()

    def _open(self) -> None:
        self._stamp = self._certificate.stamp() if self._certificate is not None else ()
        self._channel = open_channel(self._record.endpoint, channel_options(self._link_timeout_s), self._certificate)
        self._stub: Any = pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[str], None]
    ) -> GrpcSession:
        if self._certificate is not None and self._stamp != self._certificate.stamp():
            await self._channel.close(None)  # It would go on with the certificate of its start.
            self._open()
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
        """Make one call; raises `ConnectionError`, with the reason, when it fails or isn't answered in `timeout_s`."""
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
            # The call was cancelled, not the task that makes it: the channel was closed, as the worker is gone.
            raise ConnectionError(f"{self._record.name}: its connection was closed in mid-call") from None
