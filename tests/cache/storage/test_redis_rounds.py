"""Calls of several round trips to a server, which a stand-in plays: what is refused in one of them, and how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from tests.cache.storage.rigs import item, name
from twinpool.cache.storage.backends import redis_backend as redis_server
from twinpool.cache.storage.backends.redis_backend import RedisBackend
from twinpool.cache.storage.storage_backend import ObjectVerdict
from twinpool.contracts.clock import ManualClock


class StandIn:
    """A server's keys, and the client that asks it. Each round trip takes `takes` seconds."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.takes = clock, 0.0
        self.there: dict[str, bytes] = {}
        self.refused: set[str] = set()
        """Keys that the server says it has no memory for."""
        self.fails: Exception | None = None
        """What becomes of each round trip; None: it goes well."""
        self.trips = 0
        self._asked: list[Callable[[], object]] = []

    def pipeline(self, *, transaction: bool) -> StandIn:
        self._asked = []
        return self

    def exists(self, key: str) -> None:
        self._asked.append(lambda: key in self.there)

    touch = exists

    def set(self, key: str, value: bytes, ex: int | None) -> None:
        def stored() -> object:
            if key in self.refused:
                return redis.exceptions.OutOfMemoryError("OOM")
            self.there[key] = value
            return True

        self._asked.append(stored)

    def execute(self, *, raise_on_error: bool = True) -> list[object]:
        self._trip()
        return [answer() for answer in self._asked]

    def mget(self, keys: list[str]) -> list[bytes | None]:
        self._trip()
        return [self.there.get(key) for key in keys]

    def delete(self, *keys: str) -> None:
        self._trip()
        for key in keys:
            self.there.pop(key, None)

    def _trip(self) -> None:
        self.trips += 1
        self.clock.advance(self.takes)
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def server() -> StandIn:
    return StandIn(ManualClock())


def backend_of(server: StandIn) -> RedisBackend:
    backend = RedisBackend("redis://127.0.0.1:1", timeout_s=5.0, clock=server.clock)
    backend._client.close()
    backend._client = server  # type: ignore[assignment]
    return backend


def numbers(server: StandIn) -> list[int]:
    return [n for n in range(10) if f"twinpool:{name(n).key}" in server.there]


@pytest.mark.parametrize(
    ("refused", "kept", "verdicts"),
    [
        (0, (), "refused failed failed failed failed failed"),
        (0, (1,), "refused kept failed failed failed failed"),
        (1, (0,), "kept refused failed failed failed failed"),
        (2, (3,), "stored stored refused kept failed failed"),
        (2, (1, 3), "stored kept refused kept failed failed"),
        (3, (2, 5), "stored stored kept refused failed failed"),
        (5, (4,), "stored stored stored stored kept refused"),
    ],
)
def test_nothing_is_stored_behind_a_refused_object_whatever_was_there_before(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, refused: int, kept: tuple[int, ...], verdicts: str
) -> None:
    """Six objects in round trips of two: those behind the refused one would be of no use without it."""
    monkeypatch.setattr(redis_server, "_ROUND_NAMES", 2)
    backend = backend_of(server)
    for n in kept:
        assert backend.write([item(n)])[0].verdict is ObjectVerdict.STORED
    server.refused = {f"twinpool:{name(refused).key}"}
    outcomes = backend.write([item(n) for n in range(6)])
    assert [outcome.verdict.value for outcome in outcomes] == verdicts.split()
    assert numbers(server) == sorted({*range(refused), *kept})


@pytest.mark.parametrize("call", ["exists", "read", "write", "delete"])
def test_a_call_begins_no_round_trip_after_its_deadline_however_many_it_has(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each takes three of the five seconds that the whole call has."""
    monkeypatch.setattr(redis_server, "_ROUND_NAMES", 1)
    backend = backend_of(server)
    assert all(outcome.ok for outcome in backend.write([item(n) for n in range(4)]))
    server.takes, server.trips = 3.0, 0
    names = [name(n) for n in range(4)]
    if call == "exists":
        assert backend.exists(names) == [True, True, False, False]
    elif call == "read":
        found = backend.read(names, [memoryview(bytearray(64)) for _ in names])
        assert [outcome.ok for outcome in found] == [True, True, False, False]
    elif call == "write":
        stored = backend.write([item(n) for n in range(5, 9)])
        assert [outcome.ok for outcome in stored] == [True, False, False, False]
    else:
        backend.delete(names)
        assert numbers(server) == [2, 3]
    assert server.trips == 2
    assert backend.counts().failed == {"exists": 2, "read": 2, "write": 3, "delete": 0}[call]


@pytest.mark.parametrize(
    ("fails", "rests"), [(redis.ResponseError("LOADING"), False), (redis.ConnectionError("refused"), True)]
)
def test_a_server_that_answers_is_asked_again_at_once_and_one_that_is_gone_is_not(
    server: StandIn, fails: Exception, rests: bool
) -> None:
    backend, into = backend_of(server), memoryview(bytearray(8))
    server.fails = fails
    assert backend.read([name(1)], [into])[0].verdict is ObjectVerdict.FAILED
    server.fails = None
    (after,) = backend.read([name(1)], [into])
    assert after.verdict is (ObjectVerdict.FAILED if rests else ObjectVerdict.MISSING)
    assert server.trips == (1 if rests else 2)
