"""Processes that a bench starts: a server until the block ends, and what it says first."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
LOOK_S = 0.1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process whose standard input and output are pipes, ended with the block."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=STOP_TIMEOUT_S)


def first_line(process: subprocess.Popen[str]) -> str:
    """The next line that a child prints. Raises `RuntimeError` where it ends without."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args!r} ended before it served")
    return line


def wait_ready(url: str, process: subprocess.Popen[Any]) -> None:
    """Until `url` answers with 200. Raises `RuntimeError` where the process ends or the time does."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{url}: nobody serves there")
        time.sleep(LOOK_S)


@contextmanager
def child_server(
    command: Sequence[str], url: str, environment: Mapping[str, str] = os.environ, cwd: str | None = None
) -> Iterator[None]:
    """Run `command` until the block ends, which begins once `url` answers with 200.

    Raises `RuntimeError` with what it said when it doesn't become ready.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=cwd)
        try:
            try:
                wait_ready(url, process)
            except RuntimeError as error:
                said.seek(0)
                raise RuntimeError(f"{error}; it said:\n{said.read().decode(errors='replace')}") from None
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
    except (OSError, HTTPException):
        return False
