"""`transformers serve` for the time of a bench: one process that prefills and decodes, with continuous batching."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.common.child_server import child_server, free_port

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
