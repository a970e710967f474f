"""The router as a process: it says when it listens, serves over gRPC, logs JSON, and ends when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from contracts.config.cluster_config import Config
from tests.router.fake_worker import FakeCluster
from tests.router.grpc_fakes import grpc_cluster
from tests.router.http_server import DEMO

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": "."}


def command(*extra: str) -> list[str]:
    return [sys.executable, "-m", "router.main", "--model", str(DEMO), "--host", "127.0.0.1", *extra]


async def read_line(fd: int) -> bytes:
    return await asyncio.wait_for(asyncio.to_thread(os.read, fd, 64), WAIT_S)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_router_process_serves_and_ends_on_a_signal(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(Config().to_dict()))
    reading, writing = os.pipe()
    cluster = FakeCluster()
    async with grpc_cluster(cluster) as controller:
        process = subprocess.Popen(
            command(
                *("--controller", controller, "--port", "0"),
                *("--config-json", str(config), "--ready-fd", str(writing)),
            ),
            cwd=ROOT,
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        os.close(writing)
        try:
            assert await read_line(reading) == b"ready\n"
            assert process.stderr is not None
            first = process.stderr.readline()
            url = "http://" + json.loads(first)["address"]
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                body = {"prompt": [5, 6], "max_tokens": 9}
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 9
                assert (await client.get("/health")).status_code == 200
            process.send_signal(signal.SIGTERM)
            out, log = await asyncio.wait_for(asyncio.to_thread(process.communicate), WAIT_S)
        finally:
            process.kill()
            process.wait()
            os.close(reading)
    assert process.returncode in (0, -signal.SIGTERM)
    assert out == b""
    events = [json.loads(line)["event"] for line in [first, *log.splitlines()]]
    assert {"router listens", "link open", "request ended"} <= set(events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--port", "0", "--model", "/nonexistent"), "does not exist"),
        (("--port", "99999"), "can't listen"),
        (("--port", "TAKEN"), "can't listen"),
        (("--port", "0", "--config-json", "/nonexistent"), "can't read the configuration"),
        (("--port", "0", "--config-json", "WRONG"), "unknown config key router.max_queu; did you mean"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(tmp_path: Path, extra: tuple[str, ...], says: str) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"router": {"max_queu": 5}}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"TAKEN": str(taken.getsockname()[1]), "WRONG": str(wrong)}
        arguments = command("--controller", "127.0.0.1:1", *(names.get(e, e) for e in extra))
        ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, timeout=WAIT_S, env=ENVIRONMENT, check=False)
    assert ended.returncode == 1
    assert ended.stdout == b""
    (line,) = ended.stderr.splitlines()
    assert says in json.loads(line)["reason"]


@pytest.mark.slow
def test_the_router_imports_no_tensors_and_no_cluster() -> None:
    probe = (
        "import router.main, sys; print(*(m for m in ('torch', 'ray', 'triton', 'transformers') if m in sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True,
        env=ENVIRONMENT, timeout=WAIT_S,
    )  # fmt: skip
    assert ended.stdout.strip() == ""
