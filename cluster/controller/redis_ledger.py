"""The ledger on a Valkey or Redis server: for controllers of several machines.

Each call is one script, which the server runs alone and whole: who writes is checked where the write is made. A
writer's name is random, so that a table that was removed and begun anew is nobody's who wrote before.

How safe a write is, is the server's setting: it is on disk when `put` returns with ``appendonly yes`` and ``appendfsync
always``, up to a second later with ``everysec``, and never without. `WAIT` has a number of replicas hold it first. What
the server says of itself is checked at the start (`RedisLedger.check`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import redis

from twinpool.cluster.controller.leadership import LedgerLeader, LedgerLost
from twinpool.contracts.config.ledger_place import NO_SENTINEL, without_password
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.wire.redis_connection import RedisAccess, open_redis, tls_trouble

SETTING = "cluster.ledger"
TIMEOUT_S = 1.0
"""Seconds for which the server may be silent; a call fails then, at most a second one of the same kind later."""
PREFIX = "twinpool-ledger"

_LED_BY_OTHER = """
local leader = redis.call('HMGET', KEYS[3], 'writer', 'endpoint')
local other = leader[1] and leader[2] ~= ARGV[2]
"""
_NEXT = """
local term = redis.call('INCR', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1])
"""
_BEGIN = _NEXT + "return redis.call('HGETALL', KEYS[4])"
_TAKE = (
    _LED_BY_OTHER
    + """
if other then return {0} end
if ARGV[5] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then return {0} end
"""
    + _NEXT
    + """
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[3], 'writer', ARGV[1], 'endpoint', ARGV[2], 'host', ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('ZREM', KEYS[5], ARGV[2])
return {1, term, redis.call('HGETALL', KEYS[4])}
"""
)
_WRITES = "if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end\n"
_PUT = _WRITES + "redis.call('HSET', KEYS[4], ARGV[2], ARGV[3]) return 1"
_RENEW = (
    _WRITES
    + """
redis.call('HSET', KEYS[3], 'writer', ARGV[1], 'endpoint', ARGV[2], 'host', ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 1
"""
)
_RESIGN = _WRITES + "redis.call('DEL', KEYS[3]) return 1"
_FORGET = _WRITES + "redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]) return 1"
_LEADER = """
local leader = redis.call('HMGET', KEYS[3], 'endpoint', 'host')
return {leader[1] or '', leader[2] or '', redis.call('GET', KEYS[1]) or '0', redis.call('PTTL', KEYS[3])}
"""
_TRY = """
redis.call('HSET', KEYS[6], 'tried', 1)
redis.call('SET', KEYS[7], 1)
redis.call('INCR', KEYS[7])
redis.call('ZADD', KEYS[8], 1, 'tried')
redis.call('PEXPIRE', KEYS[8], 1000)
return redis.call('DEL', KEYS[6], KEYS[7], KEYS[8])
"""
"""Writes as the others do, to keys that it removes."""
_MS = "local now = redis.call('TIME') now = now[1] * 1000 + math.floor(now[2] / 1000)\n"
_STAND_BY = (
    _MS
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now)
redis.call('ZADD', KEYS[5], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[5], ARGV[2])
"""
)
_STANDBYS = _MS + "return redis.call('ZRANGEBYSCORE', KEYS[5], '(' .. now, '+inf')"


class RedisLedger:
    """The ledger of the cluster `name` on the server at `url`."""

    def __init__(self, url: str, name: str, *, access: RedisAccess | None = None, replicas: int = 0) -> None:
        """The server need not be there yet. `access`: by what it lets controllers in. With `replicas` a write counts
        as stored once so many of the server's replicas have it. Raises `ConfigError` for a URL or files that can't be
        used."""
        self._place, self._replicas = without_password(url), replicas
        self._url, self._access = url, access or RedisAccess()
        self._client = open_redis(url, TIMEOUT_S, SETTING, self._access)
        # Braces: on a server of several shards all keys of a cluster are on one.
        parts = ("term", "writer", "leader", "rows", "standbys")
        self._keys = [f"{PREFIX}:{{{name}}}:{part}" for part in parts]
        self._tried = [f"{PREFIX}:{{{name}}}:tried-{secrets.token_hex(4)}-{kind}" for kind in "abc"]
        self._writer = secrets.token_hex(16)
        self._endpoint = self._host = ""
        self._taken: Mapping[str, str] | None = None

    def check(self) -> list[str]:
        """What the server may lose, in words, one line each; none where what it says is on disk.

        Writes as a controller does, and removes it. Raises `ConfigError` where the server refuses to be used, can't be
        reached because of TLS, is a replica or a Sentinel, or may throw the table away to make room, and `OSError`
        where it can't be reached.
        """
        try:
            about = self._info("server") | self._info("replication") | self._info("memory") | self._info("persistence")
            self._check_role(about)
            self._call(self._client.eval, _TRY, len(self._keys) + len(self._tried), *self._keys, *self._tried)
            if self._replicas:
                self._call(self._client.wait, 0, 1)
        except redis.AuthenticationError as error:
            raise ConfigError(
                f"{self._place} refuses the password of cluster.ledger: {error}. The user is in the address "
                "(redis://USER@HOST), its password in the file of security.ledger_password_file or in "
                "TWINPOOL_LEDGER_PASSWORD"
            ) from None
        except redis.ResponseError as error:
            raise ConfigError(
                f"{self._place} can't keep the controller's table: {error}; the user of cluster.ledger needs "
                f"~{PREFIX}:* +@read +@write +@scripting +@connection +info +time +wait"
            ) from None
        except OSError:
            if trouble := tls_trouble(self._url, self._access, TIMEOUT_S, SETTING):
                raise ConfigError(f"{self._place} can't keep the controller's table: {trouble}") from None
            raise
        policy = str(about.get("maxmemory_policy", ""))
        if int(about.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise ConfigError(
                f"{self._place} may throw the controller's table away (maxmemory-policy {policy}): give cluster.ledger "
                "a server of its own, or set noeviction or a volatile policy"
            )
        return list(_losses(self._place, bool(int(about.get("aof_enabled", 0))), self._settings()))

    def _info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call(self._client.info, section)
        return found

    def _check_role(self, about: Mapping[str, Any]) -> None:
        """Check that the server may be written to, by what it says of itself. Raises `ConfigError`."""
        mode = about.get("redis_mode", about.get("server_mode"))
        if mode == "sentinel":
            raise ConfigError(
                f"{self._place} is a Sentinel, which keeps nothing: {NO_SENTINEL}, and set cluster.ledger_replicas to "
                "the number of replicas that must have a change"
            )
        if about.get("role") == "slave":
            primary = f"{about.get('master_host')}:{about.get('master_port')}"
            raise ConfigError(f"{self._place} is a replica of {primary}, which takes no writes: name the primary")

    def _settings(self) -> dict[str, str]:
        """The server's settings of persistence; empty where it tells nobody, as managed ones do."""
        try:
            found = {key: self._client.config_get(key).get(key, "") for key in ("appendfsync", "save")}
        except redis.ResponseError:
            return {}
        except redis.RedisError as error:
            raise OSError(f"{self._place} can't be reached: {error}") from None
        return {key: str(value) for key, value in found.items()}

    def begin(self) -> Mapping[str, str]:
        taken, self._taken = self._taken, None
        if taken is not None:
            return taken
        try:
            return _rows(self._write(_BEGIN, self._fresh_writer()))
        except OSError as error:
            raise ConfigError(f"can't read the controller's table: {error}") from None

    def put(self, key: str, value: str) -> None:
        self._check_written(self._write(_PUT, self._writer, key, value))

    def take(self, endpoint: str, host: str, lease_s: float, *, first: bool) -> bool:
        writer = self._fresh_writer()
        answer = self._write(_TAKE, writer, endpoint, host, _ms(lease_s), int(first))
        if not answer[0]:
            return False
        self._endpoint, self._host, self._taken = endpoint, host, _rows(answer[2])
        return True

    def renew(self, lease_s: float) -> None:
        self._check_written(self._script(_RENEW, self._writer, self._endpoint, self._host, _ms(lease_s)))

    def resign(self) -> None:
        self._script(_RESIGN, self._writer)

    def leader(self) -> LedgerLeader | None:
        endpoint, host, term, left_ms = self._script(_LEADER)
        if not endpoint or int(left_ms) <= 0:
            return None
        return LedgerLeader(endpoint.decode(), host.decode(), int(term), int(left_ms) / 1000)

    def stand_by(self, endpoint: str, for_s: float) -> None:
        self._script(_STAND_BY, endpoint, _ms(for_s))

    def standbys(self) -> tuple[str, ...]:
        return tuple(sorted(endpoint.decode() for endpoint in self._script(_STANDBYS)))

    def forget(self) -> None:
        self._script(_FORGET, self._writer)

    def close(self) -> None:
        self._client.close()

    # ------------------------------------------------------------ inside

    def _fresh_writer(self) -> str:
        self._writer = secrets.token_hex(16)
        return self._writer

    def _check_written(self, answer: Any) -> None:
        if not answer:
            raise LedgerLost(f"another controller keeps its table on {self._place} now, or the server has lost it")

    def _write(self, script: str, *arguments: str | int) -> Any:
        """Run a script that changes what must outlive the server; returns its answer once the replicas have the change.
        Raises `OSError` where they don't."""
        if not self._replicas:
            return self._script(script, *arguments)
        pipe = self._client.pipeline(transaction=False)  # One connection, of whose writes alone `WAIT` tells.
        pipe.eval(script, len(self._keys), *self._keys, *arguments)
        pipe.wait(self._replicas, _ms(TIMEOUT_S / 2))
        answer, have = self._asked(pipe.execute)
        if have < self._replicas:
            raise OSError(f"{self._place}: {have} of {self._replicas} replicas have what was written")
        return answer

    def _script(self, script: str, *arguments: str | int) -> Any:
        return self._asked(self._client.eval, script, len(self._keys), *self._keys, *arguments)

    def _asked(self, call: Any, *arguments: Any) -> Any:
        try:
            return self._call(call, *arguments)
        except redis.ReadOnlyError:
            # Another server is the primary now: the address may lead there, once it is looked up again.
            self._client.connection_pool.disconnect()
            raise OSError(f"{self._place} has become a replica, which takes no writes") from None
        except redis.RedisError as error:
            raise OSError(f"{self._place} answered: {error}") from None

    def _call(self, call: Any, *arguments: Any) -> Any:
        """The server's reply. Raises `OSError` where none comes, and `redis.RedisError` for a refusal."""
        try:
            return call(*arguments)
        except redis.AuthenticationError:
            raise
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise OSError(f"{self._place} can't be reached: {error}") from None
        except ConfigError as error:  # Of the file of the password, which is read for each connection.
            raise OSError(str(error)) from None


def _losses(place: str, on_disk: bool, settings: Mapping[str, str]) -> Iterable[str]:
    if not on_disk and settings and not settings["save"]:
        yield f"{place} keeps nothing on disk: when it ends, the controller's table is gone (appendonly yes)"
    elif not on_disk:
        yield f"{place} writes to disk now and then: when it ends, the latest of the table is gone (appendonly yes)"
    elif not settings:
        yield f"{place} doesn't say whether each write is on disk before it is answered (appendfsync always)"
    elif settings["appendfsync"] != "always":
        yield f"{place} may lose what it wrote last in a power cut (appendfsync {settings['appendfsync']}, not always)"


def _rows(answer: list[bytes]) -> dict[str, str]:
    """The rows of an answer, sorted by key: the server keeps no order."""
    rows = {key.decode(): value.decode() for key, value in zip(answer[::2], answer[1::2], strict=True)}
    return dict(sorted(rows.items()))


def _ms(seconds: float) -> int:
    return max(1, int(1000 * seconds))
