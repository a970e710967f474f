"""A router is replaced under its clients: no connection is refused or reset, and every answer comes whole."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_worker import FakeCluster, FakeSession, FakeWorkerClient
from tests.router.http_server import WAIT_S, Server, serving
from tests.router.service.fake_dashboard import FakeDashboard
from tests.support.certificates import TestAuthority
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerRecord
from twinpool.router.api import router_server
from twinpool.router.api.router_server import Predecessor
from twinpool.router.main import listen, listen_at

BODY = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 12}


class Visitors:
    """Clients that each open a connection, ask once and close it, without a pause."""

    def __init__(self, url: str) -> None:
        self.url, self.answered = url, 0
        self.failures: list[str] = []

    @contextmanager
    def coming(self) -> Iterator[None]:
        over = threading.Event()
        threads = [threading.Thread(target=self._come, args=(over,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(WAIT_S)

    def _come(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                with httpx.Client(trust_env=False, timeout=WAIT_S) as client:
                    assert client.get(f"{self.url}/live").status_code == 200
                self.answered += 1
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error))


def asked(server: Server) -> int:
    """Connections that this router has accepted."""
    return server.uvicorn.connections.accepted


def admin_accepted(server: Server) -> int:
    """Connections that came to the operator's port."""
    return server.uvicorn._admin_connections.accepted


def line_to(predecessor: Predecessor) -> Any:
    """The connection on which a successor says that it serves."""
    return predecessor._connection


def test_a_successor_takes_the_port_and_nobody_notices(tmp_path: Path) -> None:
    path, wholes = tmp_path / "handover", []
    old_cluster, new_cluster = FakeCluster(), FakeCluster()
    with serving(old_cluster, handover=path) as old:
        whole = old.complete(**BODY)
        old.pause("decode")

        def ask() -> None:
            wholes.append(old.complete(**BODY))

        asking, visitors = threading.Thread(target=ask), Visitors(old.url)
        asking.start()
        old.wait_until(lambda: old.service.core.requests.in_flight == 1)
        with visitors.coming(), serving(new_cluster, take_over=path) as new:
            assert new.port == old.port
            old.wait_until(lambda: old.uvicorn.leaving)
            known = old.call(lambda: asked(old))  # A turn later: what it had accepted is counted by then.
            begun = asked(new)
            new.wait_until(lambda: asked(new) >= begun + 25)
            assert asked(old) == known, "a router that leaves accepts nothing"
            assert not old.uvicorn.should_exit
            assert old.service.core.requests.in_flight == 1
            old.resume()
            asking.join(WAIT_S)
            assert wholes[0]["choices"] == whole["choices"]
            assert new.complete(**BODY)["choices"] == whole["choices"]
            new.at_rest()
            assert not visitors.failures
        assert visitors.answered >= 25
        old.client.close()
        old.wait_ended()
        assert not old_cluster.leftovers()
        assert not old.service.core.requests.in_flight


def test_over_tls_too_and_a_handshake_that_is_under_way_is_finished(tmp_path: Path) -> None:
    authority, path = TestAuthority(tmp_path), tmp_path / "handover"
    files, trust = authority.node(), authority.trust()
    config = Config(security=SecurityConfig(tls_cert=str(files.cert), tls_key=str(files.key)))
    with serving(FakeCluster(), config=config, trust=trust, handover=path) as old:
        with socket.create_connection(("127.0.0.1", old.port), WAIT_S) as plain:
            old.wait_until(lambda: asked(old) == 1)
            with serving(FakeCluster(), config=config, trust=trust, take_over=path) as new:
                old.wait_until(lambda: old.uvicorn.leaving)
                assert new.complete(**BODY)
                assert asked(old) == 1
                with trust.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                    secure.sendall(b"GET /live HTTP/1.1\r\nhost: here\r\n\r\n")
                    answer = secure.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"connection: close" in answer
        old.wait_ended()


def test_a_router_that_leaves_ends_once_its_connections_have(tmp_path: Path) -> None:
    """A connection that is kept open is closed after its next answer, and says so."""
    path = tmp_path / "handover"
    with serving(FakeCluster(), handover=path) as old:
        assert old.client.get("/live").headers.get("connection") != "close"
        with serving(FakeCluster(), take_over=path):
            old.wait_until(lambda: old.uvicorn.leaving)
            assert asked(old) == 1
            assert old.client.get("/live").headers["connection"] == "close"
            assert asked(old) == 1, "the same connection"
            old.wait_ended()


def test_the_operators_port_goes_over_too(tmp_path: Path) -> None:
    path, config = tmp_path / "handover", config_from_dict({"security": {"admin_port": 1}})
    with (
        serving(FakeCluster(), config=config, handover=path) as old,
        serving(FakeCluster(), config=config, take_over=path) as new,
    ):
        assert new.admin_url == old.admin_url
        old.wait_until(lambda: old.uvicorn.leaving)
        assert httpx.get(f"{new.admin_url}/cluster/status", timeout=60, trust_env=False).status_code == 200
        assert admin_accepted(new) == 1
        assert admin_accepted(old) == 0


def test_a_router_that_leaves_ends_its_dashboards_and_waits_for_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from_dict({"security": {"admin_port": 1}})
    with serving(FakeCluster(), config=config, dashboard=FakeDashboard()) as server:
        on_tick, ticks = server.uvicorn.on_tick, 0

        async def counted(number: int) -> bool:
            nonlocal ticks
            ticks += 1
            return await on_tick(number)

        monkeypatch.setattr(server.uvicorn, "on_tick", counted)
        operators = partial(httpx.Client, base_url=server.admin_url, trust_env=False, timeout=WAIT_S)
        with operators() as operator:
            assert operator.get("/live").status_code == 200
            with operators() as viewer, viewer.stream("GET", "/cluster/dashboard") as shown:
                lines = shown.iter_lines()
                while next(lines) != "event: frame":
                    pass
                server.call(server.uvicorn.leave)
                assert len(list(itertools.islice(lines, 200))) < 200, "it has an end"
            before = ticks
            server.wait_until(lambda: ticks > before + 1)
            assert operator.get("/live").headers["connection"] == "close"
            server.wait_ended()


def test_a_successor_that_never_serves_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "handover"
    with serving(FakeCluster(), handover=path) as old:
        first = Predecessor.reach(path)
        assert first is not None
        assert [one.getsockname()[1] for one in first.sockets] == [old.port]
        for one in first.sockets:
            one.close()
        line_to(first).close()
        assert old.complete(**BODY)
        with serving(FakeCluster(), take_over=path) as new:
            assert new.port == old.port
            new.wait_until(lambda: old.uvicorn.leaving)
            assert new.complete(**BODY)


@pytest.mark.parametrize("word", [b"", b"not yet"], ids=["silent", "another word"])
def test_who_has_the_sockets_and_does_not_say_that_it_serves_is_no_successor(
    word: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for so long, then the next one may have them."""
    monkeypatch.setattr(router_server, "TAKE_S", 0.05)
    path = tmp_path / "handover"
    with serving(FakeCluster(), handover=path) as old:
        first = Predecessor.reach(path)
        assert first is not None
        if word:
            line_to(first).send(word)
        second = Predecessor.reach(path)
        assert second is not None, "the next one gets them"
        assert not old.uvicorn.leaving
        assert old.complete(**BODY)
        second.serving()
        old.wait_until(lambda: old.uvicorn.leaving)
        for one in (*first.sockets, *second.sockets):
            one.close()
        line_to(first).close()
        old.client.close()
        old.wait_ended()


@pytest.mark.parametrize("there", ["no worker", "no decode worker"])
def test_a_successor_does_not_wait_for_workers_that_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """Else a cluster whose workers have died is without a supervisor for as long as each router waits."""
    monkeypatch.setattr(router_server, "HEALTHY_S", 1e9)
    path, cluster = tmp_path / "handover", FakeCluster()
    cluster.hidden.update(cluster.workers if there == "no worker" else ["decode-0"])
    with serving(FakeCluster(), handover=path) as old, serving(cluster, take_over=path, healthy=False) as new:
        new.wait_until(lambda: old.uvicorn.leaving)
        cluster.hidden.clear()
        new.call(cluster.changed)
        assert new.complete(**BODY)


def test_a_successor_waits_for_links_to_the_workers_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_server, "HEALTHY_S", 1e9)
    path, serves, tries, linked = tmp_path / "handover", Predecessor.serving, list[str](), list[bool]()

    class Refusing(FakeWorkerClient):
        async def connect(
            self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
        ) -> FakeSession:
            tries.append(self.worker.name)
            if tries.count(self.worker.name) < 3:
                raise ConnectionError("not yet")
            return await super().connect(on_events, on_closed)

    class Cluster(FakeCluster):
        def port(self, record: WorkerRecord) -> FakeWorkerClient:
            return Refusing(self.workers[record.name])

    def serving_now(predecessor: Predecessor) -> None:
        linked.append(all(worker.sessions for worker in cluster.workers.values()))
        serves(predecessor)

    monkeypatch.setattr(Predecessor, "serving", serving_now)
    cluster = Cluster()
    with serving(FakeCluster(), handover=path), serving(cluster, take_over=path) as new:
        assert new.complete(**BODY)
    assert linked == [True]


def test_a_port_is_free_again_once_both_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "handover"
    with serving(FakeCluster(), handover=path) as old:
        old.pause("decode")
        with httpx.Client(base_url=old.url, trust_env=False, timeout=WAIT_S) as client:
            asking = threading.Thread(target=lambda: client.post("/v1/completions", json=BODY))
            asking.start()
            old.wait_until(lambda: old.service.core.requests.in_flight == 1)
            with serving(FakeCluster(), take_over=path):
                old.wait_until(lambda: old.uvicorn.leaving)
            with listen("127.0.0.1", old.port):
                pass  # While the one that leaves still answers.
            old.resume()
            asking.join(WAIT_S)


@pytest.mark.parametrize("there", ["nothing", "a dead socket"])
def test_without_a_predecessor_there_is_nothing_to_take_over(tmp_path: Path, there: str) -> None:
    path = tmp_path / "handover"
    if there == "a dead socket":
        with listen_at(path):
            pass
    assert Predecessor.reach(path) is None


def test_a_predecessor_that_ends_while_it_is_asked_is_none(tmp_path: Path) -> None:
    path, found = tmp_path / "handover", []
    with listen_at(path) as bound:
        assert bound is not None
        thread = threading.Thread(target=lambda: found.append(Predecessor.reach(path)))
        thread.start()
        accepted: socket.socket = bound.accept()[0]
        accepted.close()
        thread.join(WAIT_S)
    assert found == [None]
