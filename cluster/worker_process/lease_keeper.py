"""The worker's side of its lease: it renews the lease in time, or the worker stops sending in time.

The lease is counted from the moment a renewal was *sent*, less a margin, so it ends here before it ends at the
controller. The keeper runs on the service's loop, apart from the engine thread: a long step delays no heartbeat, and a
controller that doesn't answer delays no step. The worker thread reads `WorkerLease.held` before each step and each
delivery of events.

Renewals go and grants come as frames of a stream (`LeaseStream`), whose other end is
`cluster.controller.controller_streams`.

A heartbeat tells how much of its processors the worker uses (`ProcessorUse`), for the dashboard and `/metrics`.
``cpu_seconds`` is what the worker's process has used of the CPU since its start; of a worker of several ranks it is the
first rank's. ``gpu_utilization`` is NVIDIA's: the share of the driver's last sampling period in which any kernel ran on
the GPU, whoever's it was. It is asked of the driver's own library (NVML), which comes with every driver; where that is
missing, or says nothing (parts of a GPU by MIG), there is no such counter.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.errors import ConfigError, TwinpoolError, WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.messages.calls import CALLS_VERSION, LEAVE, REGISTER, RENEW
from twinpool.contracts.messages.leases import GRANT_BYTES, SILENCE_S, Departure, DepartureAnswer, LeaseGrant, Renewal
from twinpool.contracts.messages.stream_frames import StreamOpening
from twinpool.contracts.messages.worker_status import (
    CPU_SECONDS,
    GPU_UTILIZATION,
    EndedWorker,
    WorkerRecord,
    WorkerStatus,
)
from twinpool.contracts.wire.controller_turns import TURN_S, ControllerTurns, call_leader
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed
from twinpool.contracts.wire.message_codec import decode, encode


class LeaseStream:
    """One open stream to the controller. Used on one event loop."""

    def __init__(self) -> None:
        self._connection = FrameConnection(SILENCE_S)
        self._connection.max_bytes = GRANT_BYTES
        self._connection.on_frame, self._connection.on_end = self._granted, self._ended
        self._asked: deque[asyncio.Future[LeaseGrant]] = deque()
        self._over = ""

    @classmethod
    async def open(
        cls,
        endpoint: str,
        incarnation: Incarnation,
        secret: str,
        certificate: CertificateFiles | None,
        *,
        timeout_s: float,
    ) -> LeaseStream:
        """Open a stream to ``host:port``, for this incarnation.

        Raises `ConnectionError` where that takes longer than `timeout_s`, or it can't be reached, and `ConfigError`
        where the certificate can't be read.
        """
        stream, (host, _, port) = cls(), endpoint.rpartition(":")
        context = NodeTls(certificate).client() if certificate is not None else None
        name = NODE_NAME if context is not None else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: stream._connection, host, int(port), ssl=context, server_hostname=name
                )
        except (OSError, ValueError, TimeoutError) as error:
            stream.close()
            raise ConnectionError(f"the controller's stream at {endpoint}: {error or 'no answer'}") from None
        except asyncio.CancelledError:  # Nobody has it to close it any more.
            stream.close()
            raise
        stream._connection.send(encode(StreamOpening(CALLS_VERSION, incarnation, access_token(secret))))
        return stream

    async def renew(self, renewal: Renewal, timeout_s: float) -> LeaseGrant:
        """Send a renewal and return its grant. Raises `ConnectionError` where none comes within `timeout_s`."""
        if self._over:
            raise ConnectionError(self._over)
        asked: asyncio.Future[LeaseGrant] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._connection.send(encode(renewal))
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        except TimeoutError:
            raise ConnectionError(f"no answer in {timeout_s:g} s") from None

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._connection.abort()
        self._ended("the stream was closed")

    def _granted(self, frame: bytes) -> None:
        try:
            grant, _ = decode(LeaseGrant, frame)
        except WireError as error:
            self._connection.abort()
            self._ended(f"a grant that can't be read: {error}")
            return
        if self._asked and not (asked := self._asked.popleft()).done():
            asked.set_result(grant)

    def _ended(self, reason: str) -> None:
        self._over = self._over or reason
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ConnectionError(reason))
        self._asked.clear()


log = logging.getLogger("twinpool.lease")

MARGIN_S = 1.0
MARGIN_SHARE = 0.2
RENEWAL_TIMEOUT_S = 1.0
"""The shortest time that a renewal gets before it is sent again on another connection."""
REGISTER_TIMEOUT_S = 2.0
"""The time that one of several controllers has to answer a registration, before it goes to the next."""
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def renewal_pause_s(config: ClusterConfig, workers: int) -> float:
    """The time between two renewals of each of so many workers, in seconds: `cluster.heartbeat_s`, or longer where the
    controller would have more than `RENEWALS_A_SECOND`, up to a fifth of the lease."""
    return max(config.heartbeat_s, min(config.lease_s / 5, workers / RENEWALS_A_SECOND))


def longest_absence_s(config: ClusterConfig, workers: int = 1) -> float:
    """The longest that the controller of so many workers may be away without one losing its lease, in seconds.

    What a lease has left when the controller goes is less a margin and the time since the last renewal; what is over
    when it is back is less the longest that an unanswered renewal, and the pause after it, may take.
    """
    left = config.lease_s - min(MARGIN_S, MARGIN_SHARE * config.lease_s) - renewal_pause_s(config, workers)
    return max(0.0, left - max(RENEWAL_TIMEOUT_S, 2 * config.heartbeat_s) - config.heartbeat_s)


RENEWALS_A_SECOND = 512
"""Heartbeats that the controller is to have a second at most."""
COUNTERS_S = 5.0
"""Seconds between two heartbeats that carry the worker's counters, which are most of a status's bytes; the controller
may say otherwise, as while somebody looks at the dashboard."""


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


@dataclass(frozen=True, slots=True)
class LeaseHandlers:
    """What a keeper calls as the controller answers, on its loop."""

    on_lost: Callable[[str], None]
    """Called once, with the reason, when the lease has ended."""
    on_drain: Callable[[], object] = lambda: None
    """Called at each renewal whose answer tells the worker to drain."""
    undrains: Callable[[], int] = lambda: 0
    """How often the worker has been undrained so far. An undrain goes to the controller first, so an answer to drain is
    ignored when an undrain came while the renewal was under way."""
    on_grant: Callable[[LeaseGrant], object] = lambda grant: None
    """Called with each grant, for what else it asks of the worker."""
    on_ended: Callable[[tuple[EndedWorker, ...]], object] = lambda ended: None
    """Called, at the start and at renewals, with the incarnations of workers that have ended, where those changed."""


class LeaseKeeper:
    """Registers one incarnation and renews its lease until the lease is lost or given back. Used on one event loop."""

    def __init__(
        self,
        record: WorkerRecord,
        controller: str,
        clock: Clock,
        heartbeat_s: float,
        status: Callable[[], WorkerStatus],
        handlers: LeaseHandlers,
        secret: str = "",
        certificate: CertificateFiles | None = None,
    ) -> None:
        """`controller`: its endpoint ``host:port``, or those of all controllers, with commas. `status` is called for
        each heartbeat. `certificate`: this node's, None where the controller is called without TLS."""
        self._secret = secret
        self._handlers = handlers
        self._ended: tuple[EndedWorker, ...] = ()
        self._certificate = certificate
        self.lease = WorkerLease(clock)
        self._record = record
        self._controllers = ControllerTurns(controller)
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._status = status
        self.failures = 0
        """Number of renewals that were not answered while the lease was still held."""
        self._channel: CallChannel | None = None
        self._stream: LeaseStream | None = None
        self._counters_at = clock.now()
        """When the counters are said next."""
        self._counters_s = COUNTERS_S
        self._ended_mark = 0
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Register within `timeout_s`, then renew in the background. Raises `LeaseRefused`."""
        try:
            sent_at, grant = await self._register(timeout_s)
        except (CallFailed, TimeoutError) as error:
            await self.close()
            reason = error.reason if isinstance(error, CallFailed) else f"no answer in {timeout_s:g} s"
            raise LeaseRefused(f"the controller at {self._controllers} can't be reached: {reason}") from None
        if grant.fenced:
            await self.close()
            raise LeaseRefused(f"{self._record.name}: incarnation {self._record.incarnation} is no longer wanted")
        self.lease.granted(sent_at, grant.lease_s)
        self._tell_ended(grant)
        self._handlers.on_grant(grant)
        self._renewing = asyncio.create_task(self._renew())

    async def _register(self, timeout_s: float) -> tuple[float, LeaseGrant]:
        """Register with the controller that leads, within `timeout_s`; returns when that was sent, and the grant.
        Raises `CallFailed` and `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while True:
                sent_at = self._clock.now()
                try:
                    one = not self._controllers.several
                    patience_s = timeout_s if one else REGISTER_TIMEOUT_S
                    grant = await self._open().call(REGISTER, self._record, patience_s, wait=one)
                except CallFailed as error:
                    if one or error.code not in _AWAY:
                        raise
                    await self._disconnect()
                    await asyncio.sleep(TURN_S)
                else:
                    return sent_at, grant

    def _open(self) -> CallChannel:
        self._channel = self._channel_to(self._controllers.current)
        return self._channel

    def _channel_to(self, endpoint: str) -> CallChannel:
        return CallChannel(endpoint, self._secret, self._certificate)

    async def _renew(self) -> None:
        """Renew as often as the controller says, every `heartbeat_s` where it says nothing.

        A renewal without an answer is repeated on a new connection: the old one may be broken unnoticed, and its
        back-off would last longer than the lease.
        """
        while True:
            sent_at, undrains, pause_s = self._clock.now(), self._handlers.undrains(), self._heartbeat_s
            try:
                grant = await self._ask(max(RENEWAL_TIMEOUT_S, 2 * self._heartbeat_s))
            except ConnectionError as error:
                if not self.lease.held:
                    reason = error.reason if isinstance(error, CallFailed) else str(error)
                    return self._handlers.on_lost(f"the controller could not be reached in time: {reason}")
                self.failures += 1
                await self._disconnect()
                pause_s = min(pause_s, TURN_S) if self._controllers.several else pause_s
            except ConfigError as unreadable:
                return self._handlers.on_lost(str(unreadable))
            else:
                if grant.fenced:
                    self.lease.fence()
                    return self._handlers.on_lost("the controller has ended the lease")
                self.lease.granted(sent_at, grant.lease_s)
                self._tell_ended(grant)
                self._handlers.on_grant(grant)
                if grant.drain and self._handlers.undrains() == undrains:
                    self._handlers.on_drain()
                await self._open_stream(grant.stream)
                self._pace_counters(grant.counters_s or COUNTERS_S)
                pause_s = grant.renew_s or pause_s
            await asyncio.sleep(pause_s)

    async def _ask(self, timeout_s: float) -> LeaseGrant:
        """Send one renewal, on the stream where there is one. Raises `ConnectionError`, and `ConfigError` where the
        certificate can't be read."""
        if self._stream is not None:
            return await self._stream.renew(self._renewal(), timeout_s)
        channel = self._channel or self._open()
        return await channel.call(RENEW, self._renewal(), timeout_s, wait=not self._controllers.several)

    async def _open_stream(self, endpoint: str) -> None:
        """Open the stream that the controller offers, where there is none: from then on renewals cost little."""
        if not endpoint or self._stream is not None:
            return
        try:
            self._stream = await LeaseStream.open(
                endpoint,
                self._record.incarnation,
                self._secret,
                self._certificate,
                timeout_s=RENEWAL_TIMEOUT_S,
            )
        except (ConnectionError, ConfigError) as error:
            log.info("renewals go by calls", extra={"reason": str(error)})
        else:
            await self._close_channel()

    async def _disconnect(self) -> None:
        """End all connections to the controller: the next renewal opens one, to the next controller where there are
        several."""
        self._controllers.next(self._controllers.current)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._counters_at = self._clock.now()  # The next controller may know none.
        await self._close_channel()

    def _pace_counters(self, seconds: float) -> None:
        """Say the counters every `seconds` from now on."""
        if seconds != self._counters_s:
            self._counters_s = seconds
            self._counters_at = min(self._counters_at, self._clock.now() + seconds)

    def _tell_ended(self, grant: LeaseGrant) -> None:
        if grant.ended_mark and grant.ended_mark == self._ended_mark:
            return
        self._ended_mark = grant.ended_mark
        if grant.ended != self._ended:
            self._ended = grant.ended
            self._handlers.on_ended(grant.ended)

    async def leave(self, timeout_s: float = 2.0, *, closed: bool = False) -> DepartureAnswer:
        """Give the lease back, because this worker has left by drain. `closed`: whether it is closed, and its process
        could go on as another. Returns the controller's answer: whether a plan for that comes. A controller that
        can't be reached is only logged."""
        self._stop_renewing()
        departure, answer = Departure(self._record.name, self._record.incarnation, closed), DepartureAnswer()
        try:
            answer = await call_leader(
                self._controllers,
                self._channel_to,
                lambda channel: channel.call(LEAVE, departure, timeout_s, wait=True),
                timeout_s,
            )
        except (CallFailed, TimeoutError) as error:
            reason = error.reason if isinstance(error, CallFailed) else f"no answer in {timeout_s:g} s"
            log.warning("the controller did not hear that this worker has left: %s", reason)
        await self.close()
        return answer

    async def close(self) -> None:
        """Stop renewing and close the connection; the lease runs out. Idempotent."""
        self._stop_renewing()
        await self._disconnect()

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    def _renewal(self) -> Renewal:
        status = self._status()
        if self._clock.now() < self._counters_at:
            status = replace(status, counters={}, counters_left_out=True)
        else:
            self._counters_at = self._clock.now() + self._counters_s
        return Renewal(self._record.name, self._record.incarnation, status, self._ended_mark)


# ---------------------------------------------------------------- what heartbeats tell of processors


_LIBRARY = "libnvidia-ml.so.1"


class ProcessorUse:
    """The use of one worker's processors, as it is now. Any thread."""

    def __init__(
        self, cpu_s: Callable[[], float] = time.process_time, gpu: Callable[[], float | None] = lambda: None
    ) -> None:
        """`cpu_s` returns the seconds of processor time used so far, `gpu` the utilization from 0 to 1 or None."""
        self._cpu_s, self._gpu = cpu_s, gpu

    def on(self, status: WorkerStatus) -> WorkerStatus:
        """A status with the use of processors among its counters."""
        found = {CPU_SECONDS: round(self._cpu_s(), 3)}
        if (used := self._gpu()) is not None:
            found[GPU_UTILIZATION] = used
        return replace(status, counters={**status.counters, **found})


def processor_use(device_name: str) -> ProcessorUse:
    """The use of this process's CPU and, for a worker on an NVIDIA GPU, of that. `device_name`: as in `engine.device`.
    Raises `ConfigError` for a GPU that can't be used."""
    import torch

    from twinpool.cache.device.device_choice import chosen_device, gpu_view

    device = chosen_device(device_name, gpu_view())
    if device.type != "cuda" or torch.version.hip is not None:
        return ProcessorUse()
    meter = GpuMeter.open(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return ProcessorUse(gpu=meter.utilization) if meter is not None else ProcessorUse()


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``, both in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuMeter:
    """One GPU, asked by NVML."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> GpuMeter | None:
        """The GPU of this UUID (``GPU-…``); None, with a line in the log, where NVML can't be asked for it."""
        try:
            library = load(_LIBRARY)
        except OSError as error:
            log.info("the use of the GPU is not known", extra={"reason": str(error)})
            return None
        handle = ctypes.c_void_p()
        found = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        if found != 0:
            log.info("the use of the GPU is not known", extra={"reason": f"NVML answers {found} for {uuid}"})
            return None
        return cls(library, handle)

    def utilization(self) -> float | None:
        """The share of the last sampling period, from 0 to 1; None where the driver doesn't say."""
        told = _Utilization()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(told)) != 0:
            return None
        return int(told.gpu) / 100
