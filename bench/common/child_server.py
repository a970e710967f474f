"""Processes that a bench starts for its time: children with pipes, servers, clusters of its own, a rival's server."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from twinpool.cli.launch_commands import own_cluster
from twinpool.cluster.processes import free_port as ports

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
LOOK_S = 0.1


def free_port() -> int:
    """A port of loopback that nobody else is given before its server has it."""
    return ports.free_port("127.0.0.1", 0)


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


NEEDS = ("fastapi", "uvicorn", "pydantic", "openai", "accelerate")

SERVE_LOAD_FLAGS = (
    "--text", "--baseline-without-done", "--baseline-extra", '{"return_token_ids": null, "ignore_eos": null}',
)  # fmt: skip
"""What the load generator must be told where the baseline is such a server."""


def missing() -> list[str]:
    """The packages that it needs and that aren't installed."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


@contextmanager
def transformers_serving(model: Path, threads: int) -> Iterator[str]:
    """The server of one checkpoint, on a free port; yields its URL, and ends it.

    Raises `RuntimeError` with what it said when it doesn't become ready.
    """
    port = free_port()
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model.absolute())]
    command += ["--cb-num-blocks", "1024", "--cb-block-size", "32", "--cb-max-batch-tokens", "512"]
    command += ["--continuous-batching", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with child_server(command, f"{url}/health", environment):
        yield url


@contextmanager
def serving(model: str, settings: Sequence[str] = (), flags: Sequence[str] = ()) -> Iterator[str]:
    """`twinpool serve` on a free port, one worker of each role unless `flags` say more; yields its URL, and ends it.

    `settings` are ``section.key=value``. Raises `ClusterFailed` with what it said when it doesn't become ready.
    """
    with own_cluster(["--model", model, *flags, *(part for one in settings for part in ("--set", one))]) as url:
        yield url
