"""A real server: full, away, hung, back again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cache.storage.rigs import RedisRig, Server, item, name, payload, read_one, reaped
from twinpool.cache.storage.backends import redis_backend as redis_server
from twinpool.cache.storage.backends.redis_backend import RedisBackend
from twinpool.cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ConfigError

ROOT = Path(__file__).parents[3]

CHURNER = """
import sys
from twinpool.cache.storage.backends.redis_backend import RedisBackend
from tests.cache.storage.rigs import item
backend = RedisBackend(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    assert all(o.ok for o in backend.write([item(k % 20, 4096) for k in range(n, n + 4)]))
    backend.delete([item(n % 20).name])
    n += 3
"""


@pytest.fixture
def own_server(server: Server, tmp_path: Path) -> Iterator[Server]:
    """One that the test may stop; `server` is asked for so that a machine without any skips."""
    own = Server(tmp_path)
    own.start()
    yield own
    own.kill()


def test_a_server_that_is_full_and_may_not_evict_refuses_and_says_so(redis_rig: RedisRig) -> None:
    backend = redis_rig.open()
    redis_rig.client.config_set("maxmemory-policy", "noeviction")
    redis_rig.client.config_set("maxmemory", 1)
    (outcome,) = backend.write([item(1)])
    redis_rig.client.config_set("maxmemory", 0)
    assert outcome.verdict is ObjectVerdict.REFUSED
    assert backend.counts().refused == 1
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    backend.close()


def test_a_full_server_that_evicts_goes_on_storing(redis_rig: RedisRig) -> None:
    backend = redis_rig.open()
    redis_rig.client.config_set("maxmemory-policy", "allkeys-lru")
    redis_rig.client.config_set("maxmemory", backend.capacity().used_bytes + 4 * 1024 * 1024)
    for n in range(0, 64, 8):
        assert all(o.ok for o in backend.write([item(k, 256 * 1024) for k in range(n, n + 8)]))
    assert 0 < sum(backend.exists([name(n) for n in range(64)])) < 64
    assert read_one(backend, name(63), 256 * 1024)[0].ok
    backend.close()


def test_capacity_is_the_servers_own(redis_rig: RedisRig) -> None:
    backend = redis_rig.open()
    assert (backend.capacity().max_bytes, backend.capacity().objects) == (0, 0)
    redis_rig.client.config_set("maxmemory", 123 * 1024 * 1024)
    backend.write([item(1), item(2)])
    capacity = backend.capacity()
    assert (capacity.max_bytes, capacity.objects) == (123 * 1024 * 1024, 2)
    assert capacity.used_bytes > 0
    backend.close()


def test_objects_expire_when_asked_to_and_a_write_renews_them(redis_rig: RedisRig) -> None:
    backend = redis_rig.open(ttl_s=1000)
    backend.write([item(1)])
    key = f"twinpool:{name(1).key}"
    assert 990 < int(redis_rig.client.ttl(key)) <= 1000
    redis_rig.client.expire(key, 10)
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.KEPT
    assert 990 < int(redis_rig.client.ttl(key)) <= 1000
    forever = redis_rig.open()
    forever.write([item(2)])
    assert redis_rig.client.ttl(f"twinpool:{name(2).key}") == -1
    backend.close()
    forever.close()


def test_a_batch_larger_than_one_round_trip_keeps_its_order(
    redis_rig: RedisRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_ROUND_BYTES", 12_000)
    backend = redis_rig.open()
    size = 5000
    items = [item(n, size) for n in range(7)]
    assert all(o.verdict is ObjectVerdict.STORED for o in backend.write(items))
    buffers = [bytearray(size) for _ in items]
    assert [o.digest for o in backend.read([i.name for i in items], [memoryview(b) for b in buffers])] == [
        i.digest for i in items
    ]
    assert all(b == i.payload for b, i in zip(buffers, items, strict=True))
    backend.close()


def test_round_trips_are_bounded_by_bytes_and_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_ROUND_BYTES", 10)
    monkeypatch.setattr(redis_server, "_ROUND_NAMES", 3)
    assert list(redis_server._rounds("abcdefgh", [4, 6, 1, 20, 1, 0, 0, 0])) == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e", "f", "g"],
        ["h"],
    ]
    assert list(redis_server._rounds([], [])) == []


def test_a_dead_server_fails_at_once_and_the_next_one_is_found(own_server: Server) -> None:
    clock = ManualClock()
    backend = RedisBackend(own_server.url, clock=clock)
    assert backend.write([item(1)])[0].ok
    own_server.kill()
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.FAILED
    assert backend.write([item(1), item(2)])[1].verdict is ObjectVerdict.FAILED
    assert backend.exists([name(1)]) == [False]
    backend.delete([name(1)])
    assert backend.capacity().max_bytes == backend.capacity().objects == 0
    assert backend.counts().failed == 4
    own_server.start()
    assert "a moment ago" in backend.write([item(1)])[0].reason
    clock.advance(1.0)
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    assert read_one(backend, name(1))[0].ok
    backend.close()


def test_a_server_restarted_between_two_calls_is_not_noticed(own_server: Server) -> None:
    backend = RedisBackend(own_server.url, clock=ManualClock())
    assert backend.write([item(1)])[0].ok
    own_server.kill()
    own_server.start()
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    backend.close()


def until_answered(clock: ManualClock, call: Callable[[], ObjectOutcome]) -> ObjectOutcome:
    """What a call comes to that a server which lives answers: on a busy machine it may be late at first."""
    end = time.monotonic() + 60
    while (outcome := call()).verdict is ObjectVerdict.FAILED:
        assert time.monotonic() < end, outcome.reason
        clock.advance(1.0)
    return outcome


@pytest.mark.slow
def test_a_server_that_hangs_fails_by_the_deadline(own_server: Server) -> None:
    clock = ManualClock()
    backend = RedisBackend(own_server.url, timeout_s=0.3, clock=clock)
    until_answered(clock, lambda: backend.write([item(1)])[0])
    own_server.signal(signal.SIGSTOP)
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.FAILED
    own_server.signal(signal.SIGCONT)
    assert until_answered(clock, lambda: read_one(backend, name(1))[0]).ok
    backend.close()


def test_a_late_answer_is_not_taken_for_the_next_calls(own_server: Server) -> None:
    """After a timeout the connection is dropped: the answer to the first read must not serve the second."""
    clock = ManualClock()
    backend = RedisBackend(own_server.url, timeout_s=0.1, clock=clock)
    for number in (1, 2):
        until_answered(clock, lambda number=number: backend.write([item(number)])[0])  # type: ignore[misc]
    own_server.signal(signal.SIGSTOP)
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.FAILED
    own_server.signal(signal.SIGCONT)
    content = b""

    def second() -> ObjectOutcome:
        nonlocal content
        outcome, content = read_one(backend, name(2))
        return outcome

    assert until_answered(clock, second).verdict is ObjectVerdict.FOUND
    assert content == item(2).payload
    backend.close()


def test_a_server_that_was_never_there_is_an_outcome() -> None:
    with socket.socket() as taken:  # Bound and not listening: nobody else can take the port meanwhile.
        taken.bind(("127.0.0.1", 0))
        backend = RedisBackend(f"redis://127.0.0.1:{taken.getsockname()[1]}/0")
        assert "can't be reached" in read_one(backend, name(1))[0].reason
        backend.close()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache.storage.url is not the address"):
        RedisBackend("localhost:6379")


@pytest.mark.slow
def test_two_processes_on_one_server_see_only_whole_objects(redis_rig: RedisRig) -> None:
    backend = redis_rig.open()
    command = [sys.executable, "-c", CHURNER, redis_rig.server.url]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    found, n = 0, 0
    with reaped(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while found < 200:
            assert process.poll() is None
            n = (n + 7) % 20
            outcome, content = read_one(backend, name(n), 4096)
            assert outcome.verdict in (ObjectVerdict.FOUND, ObjectVerdict.MISSING), outcome
            if outcome.ok:
                assert content == payload(n, 4096)
                found += 1
            elif n % 3 == 0:
                assert backend.write([item(n, 4096)])[0].ok
    backend.close()
