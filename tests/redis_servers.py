"""A real Valkey or Redis server for tests of what is kept there besides pages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

from tests.cache.storage.rigs import Server, die_with_parent

WAIT_S = 30.0


class LedgerServer:
    """A server on a port of its own, with its files in `folder`; it can be stopped, killed, and started again."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        binary = Server.binary()
        if binary is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            *(binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *(["--requirepass", password] if password else []),
            *options,
        ]
        self.client = redis.Redis.from_url(self.url, password=password or None, socket_timeout=WAIT_S)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> LedgerServer:
        self._process = subprocess.Popen(
            self._command,
            preexec_fn=die_with_parent,  # noqa: PLW1509
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                assert self.client.info("server")["process_id"] == self._process.pid, "another server has this port"
                return self
            except (redis.ConnectionError, redis.BusyLoadingError):
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not answer"

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self.client.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
