"""A server of another project in a process of its own, for as long as it is measured."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
LOOK_S = 0.2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def child_server(command: Sequence[str], url: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Run `command` until the block ends, which begins once `url` answers with 200.

    Raises `RuntimeError` with what it said when it doesn't become ready.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise RuntimeError(f"it did not become ready; it said:\n{said.read().decode(errors='replace')}")
                time.sleep(LOOK_S)
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
