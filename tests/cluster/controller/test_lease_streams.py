"""Renewals by frames: what goes by them, who is let in, and what becomes of a stream that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.raw_frames import RawStream
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.worker_process import lease_keeper
from twinpool.cluster.worker_process.lease_keeper import (
    COUNTERS_S,
    LeaseHandlers,
    LeaseKeeper,
    LeaseStream,
    renewal_pause_s,
)
from twinpool.contracts.clock import ManualClock, SystemClock
from twinpool.contracts.cluster_secret import access_token
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import CALLS_VERSION
from twinpool.contracts.messages.leases import LeaseGrant, Renewal
from twinpool.contracts.messages.stream_frames import StreamOpening
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.wire.message_codec import encode

NAME, ONE = WorkerName("decode-0"), Incarnation(1)
SECRET = "ab" * 32
WAIT_S = 60.0


class Site:
    """A controller with one worker that is ready to register."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, ClusterConfig(), MemoryLedger())
        self.server = ControllerServer(self.core, secret=SECRET)
        self.server.call(lambda core: core.pools.add(NAME, Role.DECODE))
        self.server.tick()
        self.counters = {"pages_sent": 3.0}
        self.drained: list[str] = []
        self.ended: list[tuple[EndedWorker, ...]] = []

    @property
    def endpoint(self) -> str:
        return str(self.server._service.stream)

    @property
    def streams(self) -> Any:
        """The streams that the controller has open."""
        return self.server._streams._streams

    def keeper(self, clock: Any = None) -> LeaseKeeper:
        record = WorkerRecord(NAME, Role.DECODE, ONE, 7, "n", "e", "c", WorkerLimits(8, 8), stream="s")
        return LeaseKeeper(
            record,
            self.server.endpoint,
            clock or SystemClock(),
            0.01,
            self.status,
            LeaseHandlers(
                self.drained.append, on_drain=lambda: self.drained.append("drain"), on_ended=self.ended.append
            ),
            SECRET,
        )

    def status(self) -> WorkerStatus:
        return WorkerStatus(NAME, Role.DECODE, "ready", 7, "n", ONE, 5, 6, 64, 60, counters=dict(self.counters))

    def renewal(self, mark: int = 0) -> Renewal:
        return Renewal(NAME, ONE, self.status(), mark)

    @property
    def row(self) -> Any:
        return self.core.table.rows[NAME]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.close()


def stream_of(keeper: LeaseKeeper) -> LeaseStream | None:
    """The stream that the worker renews by; None while it does so by calls."""
    return keeper._stream


async def eventually(true: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


def test_a_worker_goes_over_to_frames_and_its_orders_come_by_them(site: Site) -> None:
    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        await eventually(lambda: stream_of(keeper) is not None)
        assert keeper._channel is None, "calls are no longer needed"
        assert keeper.failures == 0
        await asyncio.to_thread(site.server.call, lambda core: core.pools.drain(NAME))
        await eventually(lambda: "drain" in site.drained)
        assert (site.row.status.running, site.row.status.pages_free) == (5, 60)
        await keeper.close()

    asyncio.run(run())


def test_a_stream_that_breaks_costs_one_renewal_and_is_opened_again(site: Site) -> None:
    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        await eventually(lambda: stream_of(keeper) is not None)
        first = stream_of(keeper)
        assert first is not None
        first._connection.abort()
        first._ended("cut")
        await eventually(lambda: stream_of(keeper) is not None and stream_of(keeper) is not first)
        assert keeper.failures == 1
        assert keeper.lease.held
        await keeper.close()

    asyncio.run(run())


def test_a_stream_without_the_token_is_answered_by_nothing(site: Site) -> None:
    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        await keeper.close()
        before = site.row.deadline
        site.clock.advance(1.0)
        stream = await LeaseStream.open(site.endpoint, ONE, "cd" * 32, None, timeout_s=WAIT_S)
        with pytest.raises(ConnectionError):
            await stream.renew(site.renewal(), WAIT_S)
        assert site.row.deadline == before
        good = await LeaseStream.open(site.endpoint, ONE, SECRET, None, timeout_s=WAIT_S)
        assert not (await good.renew(site.renewal(), WAIT_S)).fenced
        assert site.row.deadline == before + 1.0
        good.close()

    asyncio.run(run())


def opening(access: str, version: int = CALLS_VERSION) -> bytes:
    return encode(StreamOpening(version, ONE, access))


TOKEN = access_token(SECRET)


@pytest.mark.parametrize(
    "first",
    [opening(""), b"", opening(TOKEN[:-1]), opening(TOKEN + "0"), opening(TOKEN.upper()), opening(" "), opening(SECRET),
     opening(access_token("cd" * 32)), opening("\u00fc"), b"\xff\xff", opening(TOKEN, CALLS_VERSION + 1)],
    ids=["empty", "none", "begun", "longer", "upper", "blank", "secret", "another's", "strange", "unreadable", "newer"],
)  # fmt: skip
def test_a_stream_that_does_not_show_the_token_and_the_version_renews_nothing(site: Site, first: bytes) -> None:
    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        await keeper.close()
        before = site.row.deadline
        site.clock.advance(1.0)
        stream = await RawStream.connect(site.endpoint)
        if first:
            stream.write(first)
        stream.write(encode(site.renewal()))
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(WAIT_S):
                assert await stream.reader.read() == b""
        assert site.row.deadline == before
        assert site.server.call(lambda core: len(site.streams)) == 0

    asyncio.run(run())


@pytest.mark.parametrize("frame", [b"\xff\xff", b"\x90", b"\x0a\x01x\x1a\x02\x0a\x01"])
def test_a_renewal_that_makes_no_sense_ends_its_stream_and_no_other(site: Site, frame: bytes) -> None:
    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        bad = await LeaseStream.open(site.endpoint, ONE, SECRET, None, timeout_s=WAIT_S)
        connection = bad._connection
        connection.send(frame)
        await asyncio.wait_for(connection.lost, WAIT_S)
        await eventually(lambda: stream_of(keeper) is not None)
        assert keeper.failures == 0
        await keeper.close()

    asyncio.run(run())


def test_counters_are_said_every_few_seconds_and_stay_known_in_between(site: Site) -> None:
    clock = ManualClock(100.0)

    async def run() -> None:
        keeper = site.keeper(clock)
        await keeper.start(WAIT_S)
        await eventually(lambda: site.row.status is not None and site.row.status.counters == {"pages_sent": 3.0})
        site.counters["pages_sent"] = 4.0
        said = site.row.counters_at
        sent = keeper._renewal()
        assert sent.status.counters_left_out
        assert not sent.status.counters
        await eventually(lambda: stream_of(keeper) is not None)
        assert site.row.status.counters == {"pages_sent": 3.0}
        assert site.row.counters_at == said
        clock.advance(COUNTERS_S + 0.1)
        await eventually(lambda: site.row.status.counters == {"pages_sent": 4.0})
        await keeper.close()

    asyncio.run(run())


def test_ended_incarnations_are_told_once_and_again_where_they_have_changed(site: Site) -> None:
    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        stream = await LeaseStream.open(site.endpoint, ONE, SECRET, None, timeout_s=WAIT_S)
        other = WorkerName("prefill-0")

        def end(core: Controller) -> None:
            core.died(other, core.table.rows[other].incarnation, "killed")

        await asyncio.to_thread(site.server.call, lambda core: core.pools.add(other, Role.PREFILL))
        await asyncio.to_thread(site.server.tick)
        await asyncio.to_thread(site.server.call, end)
        first = await stream.renew(site.renewal(), WAIT_S)
        assert [(one.name, one.incarnation) for one in first.ended] == [(other, 1)]
        known = site.renewal(first.ended_mark)
        again = await stream.renew(known, WAIT_S)
        assert (list(again.ended), again.ended_mark) == ([], first.ended_mark)
        await asyncio.to_thread(site.server.tick)
        await asyncio.to_thread(site.server.call, end)
        changed = await stream.renew(known, WAIT_S)
        assert [(one.name, one.incarnation) for one in changed.ended] == [(other, 2)]
        await eventually(lambda: site.ended and site.ended[-1] == (EndedWorker(other, Incarnation(2)),))
        stream.close()
        await keeper.close()

    asyncio.run(run())


@pytest.mark.parametrize(("workers", "pause_s"), [(1, 0.5), (256, 0.5), (512, 1.0), (1000, 1.953125), (4096, 2.0)])
def test_many_workers_renew_less_often_but_five_times_a_lease(workers: int, pause_s: float) -> None:
    assert renewal_pause_s(ClusterConfig(heartbeat_s=0.5, lease_s=10.0), workers) == pause_s


def test_a_worker_renews_when_the_controller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    answers = iter([LeaseGrant(ONE, 10.0, renew_s=1.5), LeaseGrant(ONE, 10.0), LeaseGrant(ONE, 0.0, fenced=True)])

    class Channel:
        async def call(self, *asked: object, **options: object) -> LeaseGrant:
            return next(answers)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(lease_keeper, "CallChannel", lambda *endpoint: Channel())
    monkeypatch.setattr("twinpool.cluster.worker_process.lease_keeper.asyncio.sleep", sleep)
    record = WorkerRecord(NAME, Role.DECODE, ONE, 7, "n", "e", "c", WorkerLimits(8, 8))
    status = WorkerStatus(NAME, Role.DECODE, "ready", 7, "n", ONE, 0, 0, 1, 1)
    keeper = LeaseKeeper(
        record, "nowhere:1", ManualClock(1.0), 0.25, lambda: status, LeaseHandlers(lambda reason: None)
    )
    asyncio.run(keeper._renew())
    assert pauses == [1.5, 0.25]


def test_a_worker_that_renews_and_reads_no_grants_is_cut(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """By one socket the controller would grow as long as it is asked; other workers' streams go on."""

    async def run() -> None:
        keeper = site.keeper()
        await keeper.start(WAIT_S)
        loop = asyncio.get_running_loop()
        host, _, port = site.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as flood:
            flood.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            flood.setblocking(False)
            await loop.sock_sendall(flood, framed(opening(TOKEN)))
            streams = site.streams
            await eventually(lambda: len(streams) == 2)
            for stream in streams:  # Else the system takes megabytes before the controller has to hold any.
                assert stream._transport is not None
                ours = stream._transport.get_extra_info("socket").fileno()
                with socket.socket(fileno=os.dup(ours)) as held:
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            renewals = framed(encode(site.renewal())) * 200

            async def send_on() -> None:
                while True:
                    await loop.sock_sendall(flood, renewals)

            sending = asyncio.create_task(send_on())
            # Whether its socket is told at once depends on what lies unread in it.
            await eventually(lambda: len(streams) == 1)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await eventually(lambda: stream_of(keeper) is not None)
        assert keeper.failures == 0
        await keeper.close()

    asyncio.run(run())
    assert "reads no grants" in caplog.text


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


def test_a_worker_that_gives_up_while_it_opens_a_stream_leaves_none_behind() -> None:
    """It is told to leave in the very turn in which the connection is there."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            opening = asyncio.create_task(LeaseStream.open(endpoint, ONE, SECRET, None, timeout_s=WAIT_S))
            other, _ = await loop.sock_accept(listener)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            with other:
                other.setblocking(False)
                async with asyncio.timeout(WAIT_S):
                    assert await loop.sock_recv(other, 1) == b""

    asyncio.run(run())
