"""Ray's control store as a process that is kept: by a stand-in for it, without Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.free_ports import free_port
from tests.support.redis_servers import LedgerServer
from twinpool.cluster.processes.process_ids import same_process, start_time
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.ray_nodes import control_store
from twinpool.cluster.ray_nodes.control_store import (
    STORE_FILE,
    KeptControlStore,
    StoredTables,
    outlives_its_store,
    start_again,
    write_down,
)
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.errors import ConfigError

WAIT_S = 60.0
STAND_IN = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], str(os.getpid())).write_text(os.environ["TOLD"])
time.sleep(600)
"""


class Store:
    """A stand-in for the store, which writes its pid down whenever it is started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.runs.mkdir()
        command = [sys.executable, "-c", STAND_IN, str(self.runs)]
        self.first = subprocess.Popen(command, env={**os.environ, "TOLD": "a word"}, start_new_session=True)
        self.until(lambda: len(self.pids()) == 1)
        write_down(folder, self.first.pid)

    def pids(self) -> list[int]:
        return [int(path.name) for path in self.runs.iterdir() if path.read_text() == "a word"]

    @staticmethod
    def until(true: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if true():
                return
            pause.wait(0.01)
        raise AssertionError("it did not come")

    def close(self) -> None:
        for pid in self.pids():
            if start_time(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        self.first.wait(WAIT_S)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


def kept(store: Store, limit: int) -> KeptControlStore:
    process = store.first.pid, start_time(store.first.pid) or 0
    return KeptControlStore(store.folder, process, RestartHistory(ClusterConfig(restart_limit=limit)))


def test_a_store_that_dies_is_started_again_as_it_was_and_that_is_said(store: Store) -> None:
    keeper = kept(store, 2)
    try:
        store.first.kill()
        store.first.wait(WAIT_S)
        store.until(lambda: len(store.pids()) == 2)
        assert (keeper.failed, len(keeper.news()), keeper.news()) == ("", 1, [])
        (second,) = set(store.pids()) - {store.first.pid}
        os.kill(second, signal.SIGKILL)
        store.until(lambda: len(store.pids()) == 3)
    finally:
        keeper.close()
    (third,) = set(store.pids()) - {store.first.pid, second}
    assert same_process(third, start_time(third) or 0), "who keeps it ends, and the store goes on"


def test_a_store_that_dies_too_often_is_given_up(store: Store) -> None:
    keeper = kept(store, 1)
    try:
        store.first.kill()
        store.first.wait(WAIT_S)
        store.until(lambda: len(store.pids()) == 2)
        (second,) = set(store.pids()) - {store.first.pid}
        os.kill(second, signal.SIGKILL)
        store.until(lambda: bool(keeper.failed))
        assert "too often" in keeper.failed
    finally:
        keeper.close()
    assert len(store.pids()) == 2


def test_each_start_is_judged_by_how_long_it_lasted_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that ran for a week and then dies at once after each start is one that waits longer each time."""
    here = types.SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    monkeypatch.setattr(control_store, "start_again", lambda folder: here)
    clock, waits = ManualClock(), list[float]()
    process = os.getpid(), start_time(os.getpid()) or 0
    keeper = KeptControlStore(tmp_path, process, RestartHistory(ClusterConfig()), clock)
    keeper.close()  # Its thread: what follows is done here.
    monkeypatch.setattr(keeper._ended, "wait", waits.append)
    clock.advance(7 * 86_400.0)
    for _ in range(4):
        assert keeper._start()
        clock.advance(1.0)
    assert waits == [0.0, 0.0, 0.5, 1.0]
    clock.advance(3600.0)
    assert keeper._start()
    assert waits[4:] == [0.0], "this one has lasted"


def test_what_is_written_down_is_for_its_owner_alone(store: Store) -> None:
    assert outlives_its_store(store.folder)
    assert (store.folder / STORE_FILE).stat().st_mode & 0o777 == 0o600
    again = start_again(store.folder)
    store.until(lambda: again.pid in store.pids())
    again.kill()
    again.wait(WAIT_S)


def test_one_that_died_while_nobody_was_there_is_started_at_once_and_waited_for(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper = KeptControlStore(store.folder, None, RestartHistory(ClusterConfig()))
        try:
            keeper.await_listening(f"127.0.0.1:{listener.getsockname()[1]}")
            store.until(lambda: len(store.pids()) == 2)
        finally:
            keeper.close()


def test_one_that_doesnt_come_back_is_waited_for_no_longer_than_it_is_kept(store: Store) -> None:
    (store.folder / STORE_FILE).unlink()
    keeper = KeptControlStore(store.folder, None, RestartHistory(ClusterConfig()))
    try:
        with pytest.raises(ConfigError, match=r"cluster\.ray_storage"):
            keeper.await_listening(f"127.0.0.1:{free_port()}")
    finally:
        keeper.close()
    assert "No such file" in keeper.failed


@pytest.mark.parametrize(
    ("url", "address", "options"),
    [
        ("redis://h", "h:6379", []),
        ("redis://:ge%40heim@h:7/0", "h:7", ["--redis-password=ge@heim"]),
        ("rediss://u:p@[::1]:7", "rediss://[::1]:7", ["--redis-username=u", "--redis-password=p"]),
    ],
)
def test_ray_is_told_where_its_tables_are(url: str, address: str, options: list[str]) -> None:
    tables = StoredTables(url, "ns")
    assert tables.environment == {"RAY_REDIS_ADDRESS": address, "RAY_external_storage_namespace": "ns"}
    assert tables.options == options


@pytest.mark.parametrize("url", ["/a/file", "unix:///a/socket", "redis://:geheim@h/1", "redis://:geheim@h:x"])
def test_storage_that_ray_cant_use_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ray_storage") as refused:
        load_config(None, [f"cluster.ray_storage={url}"])
    assert "geheim" not in str(refused.value)


def test_tables_of_an_ended_ray_are_removed_and_nobody_elses(tmp_path: Path) -> None:
    server = LedgerServer(tmp_path, "--save", "").start()
    try:
        for key in ("RAYmine@KV", "RAYmine@NODE", "RAYmine2@KV", "twinpool-ledger:{mine}:rows"):
            server.client.hset(key, "a", "b")
        StoredTables(server.url, "mine").forget()
        assert sorted(server.client.keys("*")) == [b"RAYmine2@KV", b"twinpool-ledger:{mine}:rows"]
        server.kill()
        with pytest.raises(ConfigError, match="can't be used"):
            StoredTables(server.url, "mine").forget()
    finally:
        server.close()
