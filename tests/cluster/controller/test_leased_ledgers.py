"""Ledgers that controllers lead in turn: the SQLite file, and a real Valkey or Redis server."""

from __future__ import annotations

import secrets
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_servers import LedgerServer
from tests.support.served_cluster import until
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.leadership import LeasedLedger, LedgerLeader, LedgerLost
from twinpool.cluster.controller.open_ledger import PASSWORD_VARIABLE, SqliteLedger, open_ledger
from twinpool.cluster.controller.redis_ledger import TIMEOUT_S, RedisLedger
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName

LEASE_S = 60.0
HERE, THERE, ELSEWHERE = "10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"


@dataclass
class Keeper:
    """Opens ledgers of one place, as controllers do, and lets leases run out."""

    open: Callable[[], LeasedLedger]
    run_out: Callable[[], object]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerServer]:
    server = LedgerServer(tmp_path_factory.mktemp("ledger"), "--save", "", "--appendonly", "no").start()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "redis"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    opened: list[LeasedLedger] = []

    def kept(ledger: LeasedLedger) -> LeasedLedger:
        opened.append(ledger)
        return ledger

    if request.param == "sqlite":
        clock = ManualClock(50.0)
        yield Keeper(lambda: kept(SqliteLedger(tmp_path / "ledger", clock, "a boot")), lambda: clock.advance(LEASE_S))
    else:
        server: LedgerServer = request.getfixturevalue("server")
        name = f"c{secrets.token_hex(8)}"
        # Whether the server's clock passes is not what is tested here: an expiry that has come removes the key.
        leader, standbys = (f"twinpool-ledger:{{{name}}}:{part}" for part in ("leader", "standbys"))
        yield Keeper(lambda: kept(RedisLedger(server.url, name)), lambda: server.client.delete(leader, standbys))
    for ledger in opened:
        ledger.close()


def test_what_is_put_is_there_for_the_next_and_refused_to_who_was_there_before(keeper: Keeper) -> None:
    first, second = keeper.open(), keeper.open()
    assert dict(first.begin()) == {}
    first.put("worker/decode-0", '{"naïve": "☂"}')
    first.put("worker/decode-0", "again")
    first.put("cordoned", "[]")
    assert dict(second.begin()) == {"worker/decode-0": "again", "cordoned": "[]"}
    with pytest.raises(LedgerLost, match="another controller"):
        first.put("worker/decode-0", "too late")
    second.put("cordoned", '["n"]')
    assert dict(keeper.open().begin()) == {"worker/decode-0": "again", "cordoned": '["n"]'}


def test_a_controller_that_was_replaced_can_start_nothing(keeper: Keeper) -> None:
    first = Controller(ManualClock(), ClusterConfig(), keeper.open())
    first.pools.add(WorkerName("decode-0"), Role.DECODE)
    second = Controller(ManualClock(), ClusterConfig(), keeper.open())
    with pytest.raises(LedgerLost, match="another controller"):
        first.tick()
    assert "another controller" in first.table.failed
    assert [a.incarnation for a in second.tick() if isinstance(a, StartWorker)] == [1]


def test_only_one_leads_and_its_lease_is_waited_for(keeper: Keeper) -> None:
    first, second = keeper.open(), keeper.open()
    assert first.leader() is None
    assert first.take(HERE, "one", LEASE_S, first=True)
    assert not second.take(THERE, "two", LEASE_S, first=True)
    first.begin()
    first.put("a", "1")
    leader = second.leader()
    assert leader is not None
    assert (leader.endpoint, leader.host, leader.term) == (HERE, "one", 1)
    assert 0 < leader.left_s <= LEASE_S
    first.renew(LEASE_S)
    keeper.run_out()
    assert second.leader() is None
    first.put("b", "2")  # Nobody else has begun: what it writes now the next will read.
    first.renew(LEASE_S)
    assert not second.take(THERE, "two", LEASE_S, first=False)
    keeper.run_out()
    assert second.take(THERE, "two", LEASE_S, first=False)
    assert dict(second.begin()) == {"a": "1", "b": "2"}
    with pytest.raises(LedgerLost):
        first.renew(LEASE_S)
    with pytest.raises(LedgerLost):
        first.put("a", "3")
    first.resign()
    first.forget()
    leader = second.leader()
    assert leader is not None
    assert (leader.endpoint, leader.term) == (THERE, 2)
    second.put("a", "4")


def test_two_that_take_a_free_ledger_at_once_do_not_both_lead(keeper: Keeper) -> None:
    keeper.open().take(HERE, "one", LEASE_S, first=True)
    for _ in range(5):
        keeper.run_out()
        ledgers = [keeper.open() for _ in range(4)]
        led: list[LeasedLedger] = []
        gate = threading.Barrier(len(ledgers))

        def take(
            ledger: LeasedLedger, number: int, gate: threading.Barrier = gate, led: list[LeasedLedger] = led
        ) -> None:
            gate.wait(60)
            if ledger.take(f"10.0.0.{number}:1", "h", LEASE_S, first=False):
                led.append(ledger)

        threads = [threading.Thread(target=take, args=(ledger, n)) for n, ledger in enumerate(ledgers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (winner,) = led
        winner.put("a", "1")


def test_who_comes_back_at_its_own_endpoint_waits_for_nobody(keeper: Keeper) -> None:
    first, again = keeper.open(), keeper.open()
    assert first.take(HERE, "one", LEASE_S, first=True)
    assert again.take(HERE, "one", LEASE_S, first=True)
    with pytest.raises(LedgerLost):
        first.renew(LEASE_S)


def test_who_resigns_is_followed_at_once(keeper: Keeper) -> None:
    first, second = keeper.open(), keeper.open()
    assert first.take(HERE, "one", LEASE_S, first=True)
    first.resign()
    assert second.take(THERE, "two", LEASE_S, first=False)


def test_a_standby_does_not_lead_a_table_that_nobody_has_begun_and_is_shown_while_it_waits(keeper: Keeper) -> None:
    first, second = keeper.open(), keeper.open()
    assert not second.take(THERE, "two", LEASE_S, first=False)
    assert first.take(HERE, "one", LEASE_S, first=True)
    assert first.standbys() == ()
    second.stand_by(THERE, LEASE_S)
    keeper.open().stand_by(ELSEWHERE, LEASE_S)
    assert first.standbys() == (THERE, ELSEWHERE)
    first.resign()
    assert second.take(THERE, "two", LEASE_S, first=False)
    assert second.standbys() == (ELSEWHERE,)
    keeper.run_out()
    assert second.standbys() == ()


def test_an_ended_clusters_table_is_gone_and_its_standbys_lead_nothing(keeper: Keeper) -> None:
    first, second = keeper.open(), keeper.open()
    first.take(HERE, "one", LEASE_S, first=True)
    first.begin()
    first.put("a", "1")
    first.forget()
    first.resign()
    third = keeper.open()
    assert third.take(ELSEWHERE, "three", LEASE_S, first=True)
    assert dict(third.begin()) == {}
    assert not second.take(THERE, "two", LEASE_S, first=False)


def test_a_lease_from_before_the_machine_was_started_again_is_over(tmp_path: Path) -> None:
    """Its clock began anew, so that the lease's end may lie days ahead of it."""
    before = SqliteLedger(tmp_path / "ledger", ManualClock(1e6), "one boot")
    assert before.take(HERE, "one", LEASE_S, first=True)
    before.stand_by(ELSEWHERE, LEASE_S)
    after = SqliteLedger(tmp_path / "ledger", ManualClock(5.0), "another boot")
    assert after.standbys() == ()
    assert after.take(THERE, "one", LEASE_S, first=False)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.cluster.controller.open_ledger.BUSY_S", 0.05)


@pytest.mark.usefixtures("short_waits")
def test_a_lease_is_renewed_while_the_table_is_written(tmp_path: Path) -> None:
    """A busy disk may sync the table for longer than the lease."""
    clock = ManualClock(50.0)
    ledger, other = (SqliteLedger(tmp_path / "ledger", clock, "a boot") for _ in range(2))
    assert ledger.take(HERE, "one", LEASE_S, first=True)
    with closing(sqlite3.connect(tmp_path / "ledger", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match="locked"):
            ledger.put("a", "1")
        clock.advance(LEASE_S / 2)
        ledger.renew(LEASE_S)
        clock.advance(LEASE_S - 1)
        assert other.leader() == LedgerLeader(HERE, "one", 1, 1.0)
        other.stand_by(THERE, LEASE_S)
        assert ledger.standbys() == (THERE,)
        ledger.resign()
        assert other.leader() is None
        with pytest.raises(OSError, match="locked"):
            other.take(THERE, "two", LEASE_S, first=False)
    assert other.take(THERE, "two", LEASE_S, first=False)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("call", ["renew", "resign"])
def test_nobody_takes_the_ledger_between_the_look_at_the_term_and_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    clock = ManualClock(50.0)
    ledger, other = (SqliteLedger(tmp_path / "ledger", clock, "a boot") for _ in range(2))
    assert ledger.take(HERE, "one", LEASE_S, first=True)
    clock.advance(LEASE_S)
    look, tries = ledger._check_term, list[bool]()

    def looked(connection: Any) -> None:
        look(connection)
        with pytest.raises(OSError, match="locked"):
            other.take(THERE, "two", LEASE_S, first=False)
        tries.append(True)

    monkeypatch.setattr(ledger, "_check_term", looked)
    if call == "renew":
        ledger.renew(LEASE_S)
        assert other.leader() == LedgerLeader(HERE, "one", 1, LEASE_S)
    else:
        ledger.resign()
        assert other.take(THERE, "two", LEASE_S, first=False)
    assert tries


@pytest.mark.usefixtures("short_waits")
def test_a_file_of_a_build_that_kept_leases_in_the_table_is_gone_on_with(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger", isolation_level=None)) as before:
        before.execute("CREATE TABLE leader (one INTEGER PRIMARY KEY, endpoint TEXT, host TEXT, until REAL, a, b)")
        before.execute("INSERT INTO leader VALUES (1, 'gone', 'h', 1e9, 1.0, 'a boot')")
        ledger = SqliteLedger(tmp_path / "ledger", ManualClock(50.0), "a boot")
        assert ledger.take(HERE, "one", LEASE_S, first=True)
        before.execute("BEGIN IMMEDIATE")
        ledger.renew(LEASE_S)
    assert ledger.leader() == LedgerLeader(HERE, "one", 1, LEASE_S)


def test_a_ledger_may_be_made_by_several_at_a_time(tmp_path: Path) -> None:
    opened: list[SqliteLedger] = []

    def make(path: Path, start: threading.Barrier) -> None:
        start.wait(60)
        opened.append(SqliteLedger(path))

    for number in range(20):
        start = threading.Barrier(6)
        threads = [threading.Thread(target=make, args=(tmp_path / f"ledger-{number}", start)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(opened) == 6 * (number + 1)
    for ledger in opened:
        ledger.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LedgerServer]:
    server = LedgerServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always", password="geheim").start()
    yield server
    server.close()


def test_a_server_that_is_away_is_said_in_bounded_time_and_goes_on_with_all_it_had(
    own_server: LedgerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "geheim")
    ledger = open_ledger(own_server.url, "a-cluster")
    assert ledger.take(HERE, "one", LEASE_S, first=True)
    assert ledger.check() == []
    ledger.begin()
    for number in range(50):
        ledger.put(f"worker/{number}", "x" * number)
    own_server.kill()
    with pytest.raises(OSError, match=r"can't be reached") as refused:
        ledger.put("worker/0", "lost")
    assert "geheim" not in str(refused.value)
    own_server.start()
    ledger.put("worker/1", "y")
    rows = dict(open_ledger(own_server.url, "a-cluster").begin())
    assert rows == {f"worker/{number}": "x" * number for number in range(50)} | {"worker/1": "y"}
    own_server.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"can't be reached"):
        ledger.put("worker/0", "lost")
    own_server.signal(signal.SIGCONT)
    assert time.monotonic() - began < 60 * TIMEOUT_S


def test_a_wrong_password_and_a_server_that_evicts_are_refused(
    own_server: LedgerServer, server: LedgerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "falsch")
    with pytest.raises(ConfigError, match="refuses the password") as refused:
        open_ledger(own_server.url, "a-cluster").check()
    assert "falsch" not in str(refused.value)
    monkeypatch.delenv(PASSWORD_VARIABLE)
    server.client.config_set("maxmemory", 10**9)
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="may throw the controller's table away"):
        open_ledger(server.url, "a-cluster").check()
    server.client.config_set("maxmemory", 0)


def test_what_a_server_may_lose_is_said(server: LedgerServer) -> None:
    ledger = RedisLedger(server.url, "a-cluster")
    assert "keeps nothing on disk" in " ".join(ledger.check())
    server.client.config_set("save", "3600 1")
    assert "now and then" in " ".join(ledger.check())
    server.client.config_set("appendonly", "yes")
    assert "appendfsync everysec" in " ".join(ledger.check())
    server.client.config_set("appendfsync", "always")
    assert ledger.check() == []
    server.client.config_set("appendonly", "no")
    server.client.config_set("save", "")
    ledger.close()


def test_where_replicas_are_wanted_a_write_without_them_is_none(server: LedgerServer, tmp_path: Path) -> None:
    server.client.config_set("repl-diskless-sync-delay", 0)
    ledger = RedisLedger(server.url, "with-replicas", replicas=1)
    with pytest.raises(OSError, match="0 of 1 replicas"):
        ledger.take(HERE, "h", LEASE_S, first=True)
    replica = LedgerServer(tmp_path, "--save", "", "--replicaof", f"127.0.0.1 {server.port}").start()

    def held(write: Callable[[], object]) -> bool:
        """Whether the replica has it in time; a busy machine's may be late."""
        try:
            write()
        except OSError:
            return False
        return True

    try:
        until(lambda: held(lambda: ledger.take(HERE, "h", LEASE_S, first=True)), "the replica to follow", 60)
        until(lambda: held(lambda: ledger.put("a", "2")), "the replica to have a row", 60)
        assert replica.client.hget("twinpool-ledger:{with-replicas}:rows", "a") == b"2"
    finally:
        replica.close()
        ledger.close()


def test_two_clusters_of_one_server_know_nothing_of_each_other(server: LedgerServer) -> None:
    one, two = RedisLedger(server.url, "one"), RedisLedger(server.url, "two")
    assert one.take(HERE, "h", LEASE_S, first=True)
    assert two.take(HERE, "h", LEASE_S, first=True)
    one.put("a", "1")
    two.put("a", "2")
    assert dict(RedisLedger(server.url, "one").begin()) == {"a": "1"}


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a{b}"])
def test_a_ledger_on_a_server_needs_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.name"):
        open_ledger("redis://127.0.0.1:1/0", name)
