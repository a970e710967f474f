"""The worker's side of its lease: it renews the lease in time, or the worker stops sending in time.

The lease is counted from the moment a renewal was *sent*, less a margin, so it ends here before it ends at the
controller. The keeper runs on the service's loop, apart from the engine thread: a long step delays no heartbeat, and
a controller that doesn't answer delays no step. The worker thread reads `WorkerLease.held` before each step and each
delivery of events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from contracts.clock import Clock
from contracts.cluster_secret import access_metadata
from contracts.config.cluster_config import ClusterConfig
from contracts.credentials.certificate_files import CertificateFiles
from contracts.errors import ConfigError, TwinpoolError
from contracts.ids import Incarnation, WorkerName
from contracts.messages.worker_status import EndedWorker, WorkerRecord, WorkerStatus
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire.grpc_channels import channel_options
from contracts.wire.secure_grpc import open_channel
from contracts.wire.worker_protobuf import record_to_proto, status_to_proto

log = logging.getLogger("twinpool.lease")

MARGIN_S = 1.0
MARGIN_SHARE = 0.2
RENEWAL_TIMEOUT_S = 1.0
"""The shortest time that a renewal gets before it is sent again on another connection."""


def longest_absence_s(config: ClusterConfig) -> float:
    """The longest that the controller may be away without a worker losing its lease, in seconds.

    What a lease has left when the controller goes is less a margin and the time since the last renewal; what is over
    when it is back is less the longest that an unanswered renewal, and the pause after it, may take.
    """
    left = config.lease_s - min(MARGIN_S, MARGIN_SHARE * config.lease_s) - config.heartbeat_s
    return max(0.0, left - max(RENEWAL_TIMEOUT_S, 2 * config.heartbeat_s) - config.heartbeat_s)


class LeaseRefused(TwinpoolError):
    """Raised when the controller refuses this incarnation, or can't be reached at the start."""


class WorkerLease:
    """The lease: whether this worker may still send. Written by the keeper's loop, read by the engine thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: float | None = None
        self._fenced = False

    def granted(self, sent_at: float, lease_s: float) -> None:
        """Extend the lease: a registration or renewal sent at `sent_at` was granted for `lease_s`."""
        until = sent_at + lease_s - min(MARGIN_S, MARGIN_SHARE * lease_s)
        self._until = until if self._until is None else max(self._until, until)

    def fence(self) -> None:
        """End the lease for good, because the controller has."""
        self._fenced = True

    @property
    def held(self) -> bool:
        """Whether this worker may send: its lease was granted, is not fenced and has not run out."""
        return not self._fenced and self._until is not None and self._clock.now() < self._until


class LeaseKeeper:
    """Registers one incarnation and renews its lease until the lease is lost or given back. Used on one event loop."""

    def __init__(
        self,
        record: WorkerRecord,
        controller: str,
        clock: Clock,
        heartbeat_s: float,
        status: Callable[[], WorkerStatus],
        on_lost: Callable[[str], None],
        secret: str = "",
        on_drain: Callable[[], object] = lambda: None,
        undrains: Callable[[], int] = lambda: 0,
        on_ended: Callable[[tuple[EndedWorker, ...]], object] = lambda ended: None,
        certificate: CertificateFiles | None = None,
    ) -> None:
        """`controller`: its endpoint ``host:port``. `status` is called for each heartbeat. `on_lost` is called once, on
        the loop, with the reason, when the lease has ended. `on_drain` is called at each renewal whose answer tells the
        worker to drain. `undrains`: how often the worker has been undrained so far. An undrain goes to the controller
        first, so an answer to drain is ignored when an undrain came while the renewal was under way. `on_ended` is
        called, at the start and at renewals, with the incarnations of workers that have ended, where those changed.
        `certificate`: this node's, None where the controller is called without TLS."""
        self._on_drain, self._undrains, self._on_ended = on_drain, undrains, on_ended
        self._ended: tuple[EndedWorker, ...] = ()
        self._metadata, self._certificate = access_metadata(secret), certificate
        self.lease = WorkerLease(clock)
        self._record = record
        self._controller = controller
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._status = status
        self._on_lost = on_lost
        self.failures = 0
        """Number of renewals that were not answered while the lease was still held."""
        self._channel: grpc.aio.Channel | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Register within `timeout_s`, then renew in the background. Raises `LeaseRefused`."""
        stub = controller_stub(self._open())
        sent_at = self._clock.now()
        try:
            grant = await stub.Register(
                record_to_proto(self._record), timeout=timeout_s, wait_for_ready=True, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise LeaseRefused(f"the controller at {self._controller} can't be reached: {error.details()}") from None
        if grant.fenced:
            await self.close()
            raise LeaseRefused(f"{self._record.name}: incarnation {self._record.incarnation} is no longer wanted")
        self.lease.granted(sent_at, grant.lease_s)
        self._tell_ended(grant)
        self._renewing = asyncio.create_task(self._renew(stub))

    def _open(self) -> grpc.aio.Channel:
        options = channel_options()
        self._channel = open_channel(self._controller, options, self._certificate)
        return self._channel

    async def _renew(self, stub: Any) -> None:
        """Renew every `heartbeat_s`. A renewal without an answer is repeated on a new connection: the old one may be
        broken unnoticed, and its back-off would last longer than the lease."""
        while True:
            sent_at, undrains = self._clock.now(), self._undrains()
            try:
                grant = await stub.Renew(
                    self._renewal(),
                    timeout=max(RENEWAL_TIMEOUT_S, 2 * self._heartbeat_s),
                    wait_for_ready=True,
                    metadata=self._metadata,
                )
            except grpc.aio.AioRpcError as error:
                if not self.lease.held:
                    return self._on_lost(f"the controller could not be reached in time: {error.details()}")
                self.failures += 1
                await self._close_channel()
                try:
                    stub = controller_stub(self._open())
                except ConfigError as unreadable:
                    return self._on_lost(str(unreadable))
            else:
                if grant.fenced:
                    self.lease.fence()
                    return self._on_lost("the controller has ended the lease")
                self.lease.granted(sent_at, grant.lease_s)
                self._tell_ended(grant)
                if grant.drain and self._undrains() == undrains:
                    self._on_drain()
            await asyncio.sleep(self._heartbeat_s)

    def _tell_ended(self, grant: pb.LeaseGrant) -> None:
        ended = tuple(EndedWorker(WorkerName(one.name), Incarnation(one.incarnation)) for one in grant.ended)
        if ended != self._ended:
            self._ended = ended
            self._on_ended(ended)

    async def leave(self, timeout_s: float = 2.0) -> None:
        """Give the lease back, because this worker has left by drain. A controller that can't be reached is only
        logged."""
        self._stop_renewing()
        stub = controller_stub(self._channel or self._open())
        try:
            await stub.Leave(self._renewal(), timeout=timeout_s, wait_for_ready=True, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            log.warning("the controller did not hear that this worker has left: %s", error.details())
        await self.close()

    async def close(self) -> None:
        """Stop renewing and close the connection; the lease runs out. Idempotent."""
        self._stop_renewing()
        await self._close_channel()

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    def _renewal(self) -> pb.Renewal:
        return pb.Renewal(
            name=self._record.name, incarnation=self._record.incarnation, status=status_to_proto(self._status())
        )


def controller_stub(channel: grpc.aio.Channel) -> Any:
    """The gRPC client of the controller. Untyped, as generated code is."""
    return pb_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
