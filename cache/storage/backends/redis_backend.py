"""The `redis` backend: objects in a Valkey or Redis server, shared by any number of hosts.

The server bounds its own memory (`maxmemory`, and for a cache `maxmemory-policy allkeys-lru`): objects that it evicts
are missing later. Every call takes round trips of bounded size. A server that does not answer makes the call's
outcomes `FAILED`, and for a short while after that calls fail at once, so that the threads that serve storage don't all
wait for a dead host; then the next call connects again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import redis

from twinpool.cache.storage.storage_backend import (
    CUT_OFF,
    KEPT,
    MISSING,
    STORED,
    BackendCapacity,
    BackendCounts,
    BackendTally,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    seal,
    seal_bytes,
    unpack,
)
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.wire.redis_connection import open_redis

_ROUND_BYTES = 16 * 1024 * 1024
"""Payload of one round trip: bounds the copies in memory and how late a deadline is noticed."""
_ROUND_NAMES = 1024
_REST_S = 1.0
"""Calls fail at once for this long after the server could not be reached."""

T = TypeVar("T")


class RedisBackend:
    """Objects on the server at `url` (`redis://`, `rediss://` or `unix://`).

    A call gives up `timeout_s` after its start, or when the server is silent for that long. Objects expire `ttl_s`
    after they were last written or refreshed by a write; 0: never. The server need not be there yet. Raises
    `ConfigError` for a URL that can't be understood.
    """

    def __init__(self, url: str, timeout_s: float = 5.0, ttl_s: int = 0, *, clock: Clock | None = None) -> None:
        self._client = open_redis(url, timeout_s, "cache.storage.url")
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._clock = clock or SystemClock()
        self._rest_until = -1.0
        self._tally = BackendTally()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        deadline = self._clock.now() + self._timeout_s
        answers: list[bool] = []
        for part in _rounds(names, [0] * len(names)):
            pipe = self._client.pipeline(transaction=False)
            for name in part:
                pipe.exists(_key(name))
            replies = self._ask(pipe.execute, deadline)
            if isinstance(replies, ObjectOutcome):
                self._tally.add("failed", len(part))
            answers += [False] * len(part) if isinstance(replies, ObjectOutcome) else [bool(r) for r in replies]
        return answers

    def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        deadline = self._clock.now() + self._timeout_s
        outcomes: list[ObjectOutcome] = []
        pairs = list(zip(names, into, strict=True))
        for part in _rounds(pairs, [buffer.nbytes for buffer in into]):
            outcomes += self._read_round(part, deadline)
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _read_round(self, part: Sequence[tuple[ObjectName, memoryview]], deadline: float) -> list[ObjectOutcome]:
        keys = [_key(name) for name, _ in part]
        replies = self._ask(lambda: self._client.mget(keys), deadline)
        if isinstance(replies, ObjectOutcome):
            return [replies] * len(part)
        outcomes = [
            MISSING if stored is None else unpack(name, stored, buffer)
            for (name, buffer), stored in zip(part, replies, strict=True)
        ]
        bad = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.verdict is ObjectVerdict.DAMAGED]
        if bad:
            self._ask(lambda: self._client.delete(*bad), deadline)
        return outcomes

    def write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        deadline = self._clock.now() + self._timeout_s
        outcomes: list[ObjectOutcome] = []
        sound = True
        for part in _rounds(items, [memoryview(item.payload).nbytes + seal_bytes(item.name) for item in items]):
            answers = self._write_round(part, deadline) if sound else [_failed(CUT_OFF)] * len(part)
            sound = all(outcome.ok for outcome in answers)
            outcomes += answers
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _write_round(self, part: Sequence[ObjectBuffer], deadline: float) -> list[ObjectOutcome]:
        there = self._refresh([_key(item.name) for item in part], deadline)
        if isinstance(there, ObjectOutcome):
            return [there] * len(part)
        fresh = [item for item, kept in zip(part, there, strict=True) if not kept]
        stored = self._store(fresh, deadline)
        bad = next((at for at, outcome in enumerate(stored) if not outcome.ok), len(stored))
        if rest := [_key(item.name) for item, outcome in zip(fresh[bad:], stored[bad:], strict=True) if outcome.ok]:
            # The server stored objects behind one that it refused: none of them may stay.
            self._ask(lambda: self._client.delete(*rest), deadline)
        answers = iter([*stored[: bad + 1], *[_failed(CUT_OFF)] * (len(stored) - bad - 1)])
        return [KEPT if kept else next(answers) for kept in there]

    def _refresh(self, keys: Sequence[str], deadline: float) -> list[bool] | ObjectOutcome:
        """Returns, for each key, whether it is there, and refreshes its expiry (or its use time, without a TTL); one
        `FAILED` outcome for all keys if the server doesn't answer."""
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            if self._ttl_s:
                pipe.expire(key, self._ttl_s)
            else:
                pipe.touch(key)
        replies = self._ask(pipe.execute, deadline)
        return replies if isinstance(replies, ObjectOutcome) else [bool(reply) for reply in replies]

    def _store(self, items: Sequence[ObjectBuffer], deadline: float) -> list[ObjectOutcome]:
        if not items:
            return []
        pipe = self._client.pipeline(transaction=False)
        for item in items:
            sealed = b"".join((item.payload, seal(item.name, item.digest, item.payload)))
            pipe.set(_key(item.name), sealed, ex=self._ttl_s or None)
        replies = self._ask(lambda: pipe.execute(raise_on_error=False), deadline)
        if isinstance(replies, ObjectOutcome):
            return [replies] * len(items)
        return [_stored(reply) for reply in replies]

    def delete(self, names: Sequence[ObjectName]) -> None:
        deadline = self._clock.now() + self._timeout_s
        for part in _rounds(names, [0] * len(names)):
            keys = [_key(name) for name in part]
            self._ask(lambda keys=keys: self._client.delete(*keys), deadline)

    def capacity(self) -> BackendCapacity:
        """The capacity and use of the whole server, other users' keys included; all zero while it can't be reached."""
        deadline = self._clock.now() + self._timeout_s
        memory = self._ask(lambda: self._client.info("memory"), deadline)
        objects = self._ask(self._client.dbsize, deadline)
        if isinstance(memory, ObjectOutcome) or isinstance(objects, ObjectOutcome):
            return BackendCapacity(0, 0, 0)
        return BackendCapacity(int(memory["maxmemory"]), int(memory["used_memory"]), int(objects))

    def counts(self) -> BackendCounts:
        return self._tally.snapshot()

    def close(self) -> None:
        self._client.close()

    def _ask(self, call: Any, deadline: float) -> Any:
        """Returns the server's reply to `call`; without one, the `FAILED` outcome of every name of this round."""
        now = self._clock.now()
        if now < self._rest_until:
            return _failed("the server could not be reached a moment ago")
        if now >= deadline:
            return _failed("the deadline has passed")
        try:
            return call()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            self._rest_until = self._clock.now() + _REST_S
            return _failed(f"the server can't be reached: {error}")
        except redis.RedisError as error:
            return _failed(f"the server answered: {error}")


def _rounds(values: Sequence[T], sizes: Sequence[int]) -> Iterator[list[T]]:
    """Yields `values`, of these `sizes` in bytes, in runs of bounded count and bytes, none empty."""
    part: list[T] = []
    held = 0
    for value, size in zip(values, sizes, strict=True):
        if part and (held + size > _ROUND_BYTES or len(part) == _ROUND_NAMES):
            yield part
            part, held = [], 0
        part.append(value)
        held += size
    if part:
        yield part


def _stored(reply: object) -> ObjectOutcome:
    if not isinstance(reply, Exception):
        return STORED
    if "OOM" in str(reply) or isinstance(reply, redis.exceptions.OutOfMemoryError):
        return ObjectOutcome(ObjectVerdict.REFUSED, reason="the server has no memory left and may not evict")
    return _failed(f"the server answered: {reply}")


def _failed(reason: str) -> ObjectOutcome:
    return ObjectOutcome(ObjectVerdict.FAILED, reason=reason)


def _key(name: ObjectName) -> str:
    return f"twinpool:{name.key}"
