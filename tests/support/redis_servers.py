"""A real Valkey or Redis server for tests of what is kept there besides pages."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis

from tests.cache.storage.rigs import Server, die_with_parent
from tests.support.certificates import TestAuthority
from tests.support.free_ports import free_port

WAIT_S = 60.0


class LedgerServer:
    """A server on a port of its own, with its files in `folder`; it can be stopped, killed, and started again."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        password: str = "",
        tls: TestAuthority | None = None,
        settings: Path | None = None,
    ) -> None:
        """`tls`: whose certificate it has, and whose it asks clients for; it takes TLS alone then. `settings`: a file
        that it may write to."""
        binary = Server.binary()
        if binary is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        self.port = free_port()
        self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{self.port}/0"
        self._command = [
            *(
                binary,
                *([str(settings)] if settings else []),
                *_ports(self.port, tls),
                "--bind",
                "127.0.0.1",
                "--dir",
                str(folder),
            ),
            *(["--requirepass", password] if password else []),
            *options,
        ]
        own = tls.node("client") if tls else None
        files = {"ssl_ca_certs": str(own.ca), "ssl_certfile": str(own.cert), "ssl_keyfile": str(own.key)} if own else {}
        self.client = redis.Redis.from_url(self.url, password=password or None, socket_timeout=WAIT_S, **files)
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


def _ports(port: int, tls: TestAuthority | None) -> list[str]:
    if tls is None:
        return ["--port", str(port)]
    own = tls.node("server")
    files = ("--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key), "--tls-ca-cert-file", str(own.ca))
    return ["--port", "0", "--tls-port", str(port), *files]
