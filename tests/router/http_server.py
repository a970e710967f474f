"""A real router on a free port, its loop in a thread, in front of fakes; what tests do to fakes runs on that loop."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import httpx
import uvloop

from tests.router.fake_worker import FakeCluster
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR
from twinpool.router.api.app import create_admin_app, create_app
from twinpool.router.api.router_server import AdminListener, Predecessor, RouterListeners, RouterServer
from twinpool.router.links.controller_port import (
    ControllerPorts,
    DashboardSource,
    QuotaLessor,
    RecordListener,
    WorkerDirectory,
)
from twinpool.router.main import listen, listen_at
from twinpool.router.models_app import create_models_admin_app, create_models_app
from twinpool.router.service.router_service import RouterService
from twinpool.router.tracing.otlp_exporter import SpanSender

T = TypeVar("T")

DEMO = Path(__file__).parents[2] / "cluster" / "demo"
WAIT_S = 60.0


def demo_spec(**changes: Any) -> ModelSpec:
    return replace(read_model_spec(DEMO), **changes)


class Server:
    """A running router."""

    def __init__(
        self,
        cluster: FakeCluster,
        service: RouterService,
        uvicorn: RouterServer,
        port: int,
        trust: ssl.SSLContext | None = None,
        admin_port: int = 0,
    ) -> None:
        """`trust`: what a client checks HTTPS by; None: it speaks plain HTTP."""
        self.uvicorn = uvicorn
        self.cluster = cluster
        self.service = service
        self.port = port
        scheme = "http" if trust is None else "https"
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.admin_url = f"{scheme}://127.0.0.1:{admin_port}"
        verify = trust if trust is not None else False  # Reading the system's authorities takes 40 ms.
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False, verify=verify)
        self.others: dict[str, RouterService] = {}
        """The services of further models, by name."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the router's loop."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    def pause(self, role: str) -> None:
        """No worker of `role` moves until `resume`."""

        def work() -> None:
            for name, worker in self.cluster.workers.items():
                if name.startswith(role):
                    worker.pause()

        self.call(work)

    def resume(self) -> None:
        def work() -> None:
            for worker in self.cluster.workers.values():
                worker.resume()

        self.call(work)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Let the loop run until `is_so`; fails after some seconds."""

        async def run() -> None:
            deadline = time.monotonic() + WAIT_S
            while not is_so():
                assert time.monotonic() < deadline, "it never is so"
                await asyncio.sleep(0.001)

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        assert wait([future], WAIT_S + 1).done, "the router's loop has ended"
        future.result()

    def wait_ended(self) -> None:
        """Wait until the router has ended by itself; fails after some seconds."""
        pause, deadline = threading.Event(), time.monotonic() + WAIT_S
        while self.loop.is_running():
            assert time.monotonic() < deadline, "the router goes on"
            pause.wait(0.01)

    def serves(self) -> bool:
        core = self.service.core
        up = sum(w.alive and w.state == "ready" for w in self.cluster.workers.values())
        return sum(len(core.serving(role)) for role in PAIR) == up

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post("/v1/completions", {"prompt": [5, 6, 7], "seed": 1, **body})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must be refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def stream(self, path: str, body: Any, **headers: str) -> list[dict[str, Any] | str]:
        """Every event of a stream; ``[DONE]`` as a string."""
        with self.client.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [
                line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                for line in response.iter_lines()
                if line.startswith("data: ")
            ]

    def at_rest(self) -> None:
        """Nothing is left anywhere: asserted after each test."""
        self.wait_until(lambda: not self.cluster.leftovers() and not self.service.core.requests.in_flight)
        assert self.call(self.service.check) == []


@contextmanager
def serving(
    cluster: FakeCluster,
    *,
    spec: ModelSpec | None = None,
    config: Config | None = None,
    directory: WorkerDirectory | None = None,
    trust: ssl.SSLContext | None = None,
    lessor: QuotaLessor | None = None,
    handover: Path | None = None,
    take_over: Path | None = None,
    recorder: RecordListener | None = None,
    span_sender: SpanSender | None = None,
    dashboard: DashboardSource | None = None,
    healthy: bool = True,
    others: Mapping[str, FakeCluster] = MappingProxyType({}),
) -> Iterator[Server]:
    """A router on a free port that serves until the end of the block. Where `config` has an operators' port, that is a
    free one too. `handover` and `take_over`: where it hands its ports over, and where it gets another router's.
    `healthy`: whether it is waited for until it could serve. `others`: further models, by name, each over a cluster of
    its own."""
    config = config or Config()
    service = RouterService(
        spec or demo_spec(),
        config,
        directory or cluster,
        ports=ControllerPorts(lessor=lessor, recorder=recorder, dashboard=dashboard),
        span_sender=span_sender,
    )
    further = [
        RouterService(demo_spec(), _served_as(config, name), own, ports=ControllerPorts(lessor=lessor))
        for name, own in others.items()
    ]
    reading, writing = os.pipe()
    predecessor = Predecessor.reach(take_over) if take_over is not None else None
    with ExitStack() as stack:
        taken = predecessor.sockets if predecessor is not None else [listen("127.0.0.1", 0), listen("127.0.0.1", 0)]
        bound, *rest = [stack.enter_context(one) for one in taken]
        admin = rest[0] if rest else bound
        app = create_models_app([service, *further]) if further else create_app(service)
        admin_app = create_models_admin_app([service, *further]) if further else create_admin_app(service)
        operators = AdminListener(admin_app, admin) if config.security.admin_port else None
        listeners = RouterListeners(operators, handover=stack.enter_context(listen_at(handover)))
        uvicorn_server = RouterServer(app, service, writing, listeners, predecessor, others=further)
        ports = bound.getsockname()[1], admin.getsockname()[1]
        server = Server(cluster, service, uvicorn_server, ports[0], trust, ports[1])
        server.others = dict(zip(others, further, strict=True))
        thread = threading.Thread(target=server.loop.run_until_complete, args=(uvicorn_server.serve([bound]),))
        thread.start()
        try:
            assert os.read(reading, 16) == b"ready\n"
            if healthy:
                server.wait_until(server.serves)
            yield server
        finally:
            server.client.close()  # A connection that is open at the end costs a turn of a tenth of a second.
            uvicorn_server.should_exit = True
            thread.join(WAIT_S)
            server.loop.close()
            os.close(reading)
    assert not thread.is_alive()


def _served_as(config: Config, name: str) -> Config:
    return replace(config, router=replace(config.router, served_model_name=name))


def router_config(**changes: Any) -> Config:
    return config_from_dict({"router": changes})


async def eventually(is_so: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Let other tasks run until `is_so`."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it never is so"
        await asyncio.sleep(0)
