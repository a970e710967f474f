"""The three backends under one handle that can also get at the stored bytes, and objects to put in them."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import redis

from tests.support.free_ports import free_port
from twinpool.cache.storage.backends.file_backend import FileBackend
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.backends.redis_backend import RedisBackend
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName, ObjectOutcome, StorageBackend, seal_bytes
from twinpool.contracts.clock import Clock

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
SERVERS = ("valkey-server", "redis-server")


def name(n: int, *, pool: str = "full", fingerprint: str = "model", part: str = "0of1") -> ObjectName:
    return ObjectName(fingerprint, pool, hashlib.blake2b(b"%d" % n, digest_size=16).digest(), part)


def payload(n: int, size: int) -> bytes:
    """Bytes that only the object `n` has."""
    return hashlib.shake_128(b"payload %d" % n).digest(size)


def item(n: int, size: int = 64) -> ObjectBuffer:
    return ObjectBuffer(name(n), digest=n * 0x9E3779B97F4A7C15 % 2**64, payload=payload(n, size))


def stored_bytes(size: int) -> int:
    """What one object of `size` occupies."""
    return size + seal_bytes(name(0))


def read_one(backend: StorageBackend, which: ObjectName, size: int = 64) -> tuple[ObjectOutcome, bytes]:
    buffer = bytearray(size)
    (outcome,) = backend.read([which], [memoryview(buffer)])
    return outcome, bytes(buffer)


class Rig(Protocol):
    def open(self, max_bytes: int = 1 << 30) -> StorageBackend: ...

    def get_raw(self, which: ObjectName) -> bytes: ...

    def put_raw(self, which: ObjectName, stored: bytes) -> None: ...


class MemoryRig:
    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._last: MemoryBackend | None = None

    def open(self, max_bytes: int = 1 << 30) -> StorageBackend:
        self._last = MemoryBackend(self._name, max_bytes)
        return self._last

    def get_raw(self, which: ObjectName) -> bytes:
        assert self._last is not None
        return self._last.store.objects[which.key]

    def put_raw(self, which: ObjectName, stored: bytes) -> None:
        assert self._last is not None
        self._last.store.pop(which.key)
        self._last.store.objects[which.key] = stored
        self._last.store.used_bytes += len(stored)


@dataclass
class FileRig:
    root: Path

    def __post_init__(self) -> None:
        self._ticks = itertools.count(10**18, 10**9)

    def open(self, max_bytes: int = 1 << 30) -> FileBackend:
        """Use times are a counter: each use is later than all before it."""
        backend = FileBackend(self.root, max_bytes, wall_ns=lambda: next(self._ticks))
        assert backend.wait_counted(60)
        return backend

    def path(self, which: ObjectName) -> Path:
        return self.root / which.key[:2] / f"{which.key}.page"

    def get_raw(self, which: ObjectName) -> bytes:
        return self.path(which).read_bytes()

    def put_raw(self, which: ObjectName, stored: bytes) -> None:
        self.path(which).parent.mkdir(exist_ok=True)
        self.path(which).write_bytes(stored)

    def objects(self) -> list[Path]:
        return sorted(self.root.glob("??/*.page"))

    def temps(self) -> list[Path]:
        return sorted(self.root.glob("??/.*.tmp"))


class RedisRig:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = redis.Redis.from_url(server.url)
        self.client.flushall()
        self.client.config_set("maxmemory", 0)

    def open(self, max_bytes: int = 0, ttl_s: int = 0, clock: Clock | None = None) -> RedisBackend:
        return RedisBackend(self.server.url, ttl_s=ttl_s, clock=clock)

    def get_raw(self, which: ObjectName) -> bytes:
        stored = self.client.get(f"twinpool:{which.key}")
        assert isinstance(stored, bytes)
        return stored

    def put_raw(self, which: ObjectName, stored: bytes) -> None:
        self.client.set(f"twinpool:{which.key}", stored)


class Server:
    """A Valkey or Redis server on a port of its own, its files in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def binary() -> str | None:
        return next((path for path in map(shutil.which, SERVERS) if path), None)

    def start(self) -> None:
        binary = self.binary()
        assert binary is not None
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        # The function makes one system call and takes no lock.
        self._process = subprocess.Popen(
            command,
            preexec_fn=die_with_parent,  # noqa: PLW1509
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        client, deadline = redis.Redis.from_url(self.url), time.monotonic() + 60
        while True:
            try:
                assert client.info("server")["process_id"] == self._process.pid, "another server has this port"
                break
            except redis.ConnectionError:
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not answer"
        client.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def die_with_parent() -> None:
    """Run in a child: a test run that is killed leaves no server behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def reaped(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill and collect a child of this test, whatever happens."""
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
