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

from tests.router.fake_worker import FakeCluster
from tests.router.grpc_fakes import grpc_cluster
from tests.router.http_server import DEMO
from tests.support.free_ports import free_port
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.worker_config import EngineConfig

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": "."}


def command(*extra: str) -> list[str]:
    return [sys.executable, "-m", "twinpool.router.main", "--model", str(DEMO), "--host", "127.0.0.1", *extra]


async def read_line(fd: int) -> bytes:
    return await asyncio.wait_for(asyncio.to_thread(os.read, fd, 64), WAIT_S)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_router_process_serves_and_ends_on_a_signal(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(Config(engine=EngineConfig(context=512)).to_dict()))
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
                models = await client.get("/v1/models")
                assert models.json()["data"][0]["max_model_len"] == 512
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
@pytest.mark.asyncio
async def test_routers_share_a_port_and_each_says_at_its_own_socket_whether_it_lives(tmp_path: Path) -> None:
    """When one of them is killed, its connections end and those of the other go on."""
    cluster, processes = FakeCluster(), []
    port = free_port()
    async with grpc_cluster(cluster) as controller:
        for number in (0, 1):
            reading, writing = os.pipe()
            live = tmp_path / f"{number}.live"
            arguments = command(
                *("--controller", controller, "--port", str(port), "--reuse-port", "--name", f"router-{number}"),
                *("--live-socket", str(live), "--ready-fd", str(writing)),
            )
            processes.append(
                subprocess.Popen(arguments, cwd=ROOT, pass_fds=[writing], stderr=subprocess.DEVNULL, env=ENVIRONMENT)
            )
            os.close(writing)
            assert await read_line(reading) == b"ready\n"
            os.close(reading)
            assert live.stat().st_mode & 0o077 == 0, "only its owner can ask"
        try:
            clients = [httpx.AsyncClient(timeout=WAIT_S, trust_env=False) for _ in range(24)]
            url = f"http://127.0.0.1:{port}/live"
            assert [(await client.get(url)).status_code for client in clients] == [200] * 24
            assert await _health(tmp_path / "1.live") == 200
            processes[1].kill()
            processes[1].wait(WAIT_S)
            with pytest.raises(httpx.ConnectError):
                await _health(tmp_path / "1.live")
            assert await _health(tmp_path / "0.live") == 200
            assert [(await client.get(url)).status_code for client in clients] == [200] * 24
            for client in clients:
                await client.aclose()
        finally:
            for process in processes:
                process.kill()
                process.wait(WAIT_S)


async def _health(path: Path) -> int:
    """What a router answers at its own socket, once its workers are known."""
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=WAIT_S) as client:
        async with asyncio.timeout(WAIT_S):
            while (answer := await client.get("http://router/health")).status_code != 200:
                await asyncio.sleep(0.01)
        return answer.status_code


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
    unwanted = ("torch", "ray", "triton", "transformers")
    probe = f"import twinpool.router.main, sys; print(*(m for m in {unwanted} if m in sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True,
        env=ENVIRONMENT, timeout=WAIT_S,
    )  # fmt: skip
    assert ended.stdout.strip() == ""
