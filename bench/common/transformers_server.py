"""`transformers serve` for the time of a bench: one process that prefills and decodes, with continuous batching."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model.absolute())]
    command += ["--cb-num-blocks", "1024", "--cb-block-size", "32", "--cb-max-batch-tokens", "512"]
    command += ["--continuous-batching", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise RuntimeError(f"it did not become ready; it said:\n{said.read().decode(errors='replace')}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
