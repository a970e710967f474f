"""Mutual TLS between the processes of a cluster: who gets in at workers and controller, and who doesn't."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from tests.cluster.fake_worker import FakeWorker, submit
from tests.support.certificates import TestAuthority
from tests.support.raw_frames import RawStream, opening
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper, LeaseRefused
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.cluster.worker_process.worker_process import WorkerProcess, serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.clock import ManualClock, SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.calls import WATCH, WORKER_STATUS, Empty
from twinpool.contracts.messages.cluster_view import WatchRequest
from twinpool.contracts.messages.pool_changes import DrainWorkers
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd
from twinpool.contracts.messages.worker_events import Done, Event
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerView
from twinpool.contracts.wire import frame_connection
from twinpool.contracts.wire.grpc_calls import open_channel
from twinpool.contracts.wire.message_codec import encode
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.worker_links import GrpcWorkerClient

NAME = WorkerName("decode-0")
WAIT_S = 60.0
METADATA = (("twinpool-incarnation", "3"),)


class Secured:
    """A worker of incarnation 3 and a controller, both with the certificate `files`."""

    def __init__(self, files: CertificateFiles) -> None:
        self.files = files
        self.host = WorkerThread(FakeWorker(incarnation=3), idle_s=0.02)
        self.host.start()
        self.loop = AsyncioThread("test-service")
        self.server = serve_worker(self.loop, self.host, 3, "127.0.0.1", certificate=files)
        self.worker, self.stream = self.server.endpoint, self.server.stream
        self.core = Controller(ManualClock(), ClusterConfig(lease_s=10.0), MemoryLedger())
        self.controller = ControllerServer(self.core, certificate=files)
        self.controller.call(lambda core: core.pools.add(NAME, Role.DECODE))
        self.controller.call(Controller.tick)

    @property
    def record(self) -> WorkerRecord:
        fits = WorkerLimits(1024, 2048)
        return WorkerRecord(
            NAME, Role.DECODE, Incarnation(1), 7, "n", self.worker, "tcp://x", fits, stream=self.stream,
            stream_protocol=STREAM_PROTOCOL,
        )  # fmt: skip

    def close(self) -> None:
        assert self.host.stop(WAIT_S)
        self.server.stop(0.1)
        self.controller.close()
        self.loop.stop()


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "mine")


@pytest.fixture
def secured(authority: TestAuthority) -> Iterator[Secured]:
    found = Secured(authority.node())
    yield found
    found.close()


async def refusal(channel: grpc.aio.Channel, *, controller: bool) -> grpc.StatusCode | None:
    """How a call on this channel fails, None where it is served."""
    async with channel:
        try:
            if controller:
                watch: Any = channel.unary_stream(WATCH.path, None, None)
                await watch(encode(WatchRequest()), timeout=WAIT_S).read()
            else:
                status: Any = channel.unary_unary(WORKER_STATUS.path, None, None)
                await status(encode(Empty()), timeout=WAIT_S, metadata=METADATA)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return None


def stranger(kind: str, authority: TestAuthority, folder: Path, endpoint: str) -> grpc.aio.Channel:
    """A channel of somebody who is no node of the cluster."""
    ca = authority.ca.read_bytes()
    named = [("grpc.ssl_target_name_override", NODE_NAME)]
    if kind == "plain":
        return grpc.aio.insecure_channel(endpoint)
    if kind == "no certificate":
        return grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(ca), options=named)
    if kind == "another authority's":
        files = TestAuthority(folder / "theirs").node()
    else:
        files = authority.expired()
    credentials = grpc.ssl_channel_credentials(ca, files.key.read_bytes(), files.cert.read_bytes())
    return grpc.aio.secure_channel(endpoint, credentials, options=named)


@pytest.mark.parametrize("controller", [False, True], ids=["worker", "controller"])
@pytest.mark.parametrize("kind", ["plain", "no certificate", "another authority's", "expired"])
def test_who_is_no_node_is_not_served(
    secured: Secured, authority: TestAuthority, tmp_path: Path, kind: str, controller: bool
) -> None:
    endpoint = secured.controller.endpoint if controller else secured.worker

    async def life() -> None:
        assert await refusal(stranger(kind, authority, tmp_path, endpoint), controller=controller) is not None
        assert await refusal(open_channel(endpoint, [], secured.files), controller=controller) is None

    asyncio.run(life())


@pytest.mark.parametrize("kind", ["plain", "another authority's", "expired"])
def test_who_only_claims_to_be_a_worker_or_the_controller_is_told_nothing(
    authority: TestAuthority, tmp_path: Path, kind: str
) -> None:
    """A node calls the port of an impostor: it finds out before it has said a word."""
    mine = authority.node()
    theirs = {
        "plain": None, "expired": authority.expired(), "another authority's": TestAuthority(tmp_path / "theirs").node()
    }[kind]  # fmt: skip
    loop, host = AsyncioThread("impostor"), WorkerThread(FakeWorker(incarnation=3), idle_s=0.02)
    host.start()
    server = serve_worker(loop, host, 3, "127.0.0.1", certificate=theirs)

    async def ask() -> grpc.StatusCode | None:
        return await refusal(open_channel(server.endpoint, [], mine), controller=False)

    async def open_stream() -> None:
        record = WorkerRecord(
            NAME, Role.DECODE, Incarnation(3), 7, "n", server.endpoint, "", WorkerLimits(1, 1), stream=server.stream
        )
        link = GrpcWorkerClient(record, certificate=mine)
        try:
            with pytest.raises(ConnectionError):
                await link.connect(print, print)
        finally:
            await link.aclose()

    try:
        assert asyncio.run(ask()) is not None
        asyncio.run(open_stream())
    finally:
        assert host.stop(WAIT_S)
        server.stop(0.1)
        loop.stop()


def test_router_worker_and_controller_find_each_other_with_certificates(secured: Secured) -> None:
    async def life() -> None:
        lost: list[str] = []
        keeper = LeaseKeeper(
            secured.record,
            secured.controller.endpoint,
            SystemClock(),
            0.01,
            FakeWorker(incarnation=1).status,
            LeaseHandlers(lost.append),
            certificate=secured.files,
        )
        await keeper.start(WAIT_S)
        directory = ControllerDirectory(secured.controller.endpoint, certificate=secured.files)
        views: list[tuple[WorkerView, ...]] = []
        unwatch = directory.watch(views.append)
        async with asyncio.timeout(WAIT_S):
            while not views or not views[-1][0].record.endpoint:
                await asyncio.sleep(0.001)
        link = directory.port(replace(views[-1][0].record, incarnation=Incarnation(3)))
        assert (await link.status()).incarnation == 3
        heard: list[Event] = []
        ended: list[StreamEnd] = []
        session = await link.connect(heard.extend, ended.append)
        session.send([submit("a", 2)])
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(event, Done) for event in heard):
                await asyncio.sleep(0.001)
        session.close()
        await link.aclose()
        assert (await directory.change_pools(DrainWorkers(NAME))).names == (NAME,)
        unwatch()
        await keeper.close()
        assert not lost
        assert not ended

    asyncio.run(life())


@pytest.mark.parametrize("kind", ["plain", "no certificate", "another authority's", "expired"])
def test_who_is_no_node_has_no_stream(secured: Secured, authority: TestAuthority, tmp_path: Path, kind: str) -> None:
    context: ssl.SSLContext | None = None
    if kind != "plain":
        context = authority.trust()
        files = {"another authority's": TestAuthority(tmp_path / "theirs").node, "expired": authority.expired}.get(kind)
        if files is not None:
            context.load_cert_chain(files().cert, files().key)

    async def life() -> None:
        try:
            stream = await RawStream.connect(secured.stream, context)
            stream.write(opening(3))
            stream.send(submit("a", 2))
            found = await asyncio.wait_for(stream.reader.read(), WAIT_S)
        except OSError:
            return
        # Whoever spoke no TLS, or had no certificate, may be told so in TLS' words, and hears no frame.
        assert len(found) <= 7, found

    asyncio.run(life())
    assert secured.host.status().result(WAIT_S).steps == 0


def test_handshakes_that_never_end_make_room_and_are_closed(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_connection, "STRANGERS", 4)
    monkeypatch.setattr(frame_connection, "HANDSHAKE_S", 1000.0)

    async def life() -> None:
        silent = [await RawStream.connect(secured.stream) for _ in range(12)]
        for stranger in silent[:8]:
            assert await asyncio.wait_for(stranger.reader.read(), WAIT_S) == b""
        link = GrpcWorkerClient(replace(secured.record, incarnation=Incarnation(3)), certificate=secured.files)
        session = await link.connect(lambda events: None, lambda reason: None)
        session.close()
        await link.aclose()
        for stranger in silent:
            stranger.abort()

    asyncio.run(life())


def test_a_worker_without_a_certificate_gets_no_lease(secured: Secured, authority: TestAuthority) -> None:
    async def life() -> None:
        for files in (None, authority.expired()):
            keeper = LeaseKeeper(
                secured.record,
                secured.controller.endpoint,
                SystemClock(),
                0.01,
                FakeWorker(incarnation=1).status,
                LeaseHandlers(lambda reason: None),
                certificate=files,
            )
            with pytest.raises(LeaseRefused, match="can't be reached"):
                await keeper.start(0.5)

    asyncio.run(life())


def test_new_files_hold_for_new_connections_and_bad_ones_change_nothing(
    secured: Secured, authority: TestAuthority
) -> None:
    first = secured.files.cert.read_bytes()

    async def served_with() -> str:
        """The certificate that the worker shows to new connections, calls and streams."""
        shown = {await shown_at(address) for address in (secured.worker, secured.stream)}
        assert len(shown) == 1
        return shown.pop()

    async def shown_at(address: str) -> str:
        host, port = address.split(":")
        context = authority.trust()
        context.check_hostname = False
        context.load_cert_chain(secured.files.cert, secured.files.key)
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        shown = ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        writer.close()
        return shown

    async def life() -> None:
        link = GrpcWorkerClient(replace(secured.record, incarnation=Incarnation(3)), certificate=secured.files)
        assert (await link.status()).incarnation == 3
        assert (await served_with()).encode() == first
        authority.node()  # The same files, with a new certificate.
        assert (await served_with()).encode() == secured.files.cert.read_bytes() != first
        second, key = secured.files.cert.read_bytes(), secured.files.key.read_bytes()
        authority.node(days=1, ago=2)
        assert await refusal(open_channel(secured.worker, [], authority.node("other")), controller=False) is None
        secured.files.cert.write_bytes(second)
        secured.files.key.write_bytes(key)
        assert (await served_with()).encode() == second
        assert (await link.status()).incarnation == 3
        session = await link.connect(lambda events: None, lambda reason: None)  # On a new channel, with new files.
        session.close()
        await link.aclose()

    asyncio.run(life())


def test_a_worker_whose_nodes_certificate_has_expired_builds_nothing_and_says_why(
    authority: TestAuthority, tmp_path: Path
) -> None:
    """`serve` has checked its own node's files; every other node's are checked there."""
    old = authority.expired()
    security = SecurityConfig(cluster_ca=str(old.ca), cluster_cert=str(old.cert), cluster_key=str(old.key))
    plan = WorkerPlan(
        NAME, Role.DECODE, Incarnation(1), tmp_path, Config(security=security), {}, "127.0.0.1", "127.0.0.1:1", tmp_path
    )

    def build(plan: WorkerPlan) -> Worker:
        raise AssertionError("nothing is built")

    with pytest.raises(ConfigError, match=r"security\.cluster_cert .* has expired"):
        WorkerProcess(plan, build).run()
