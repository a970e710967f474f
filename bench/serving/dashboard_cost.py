"""What the dashboard costs the controller: its share of a core with viewers and without, turn by turn.

    python -m bench.serving.dashboard_cost [--workers 64] [--viewers 5] [--seconds 20] [--rounds 3]

A real controller process with its ledger; the workers' lease keepers and the routers' directories are production's, in
this process. Workers' statuses are those of a simulated cluster (`bench.serving.simulated_dashboard`) with as many
counters as real ones have, nine a link. Each viewer looks at a router of its own, which is the dearest way: the frames
of viewers of one router go to it once. Without viewers the routers report and the history is kept all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from bench.common import machine
from bench.serving.simulated_dashboard import SimulatedCluster
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.controller_client import ControllerClient
from twinpool.cluster.worker_process.lease_keeper import LeaseKeeper
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.router_report import RouterReport
from twinpool.contracts.messages.worker_status import WorkerStatus, WorkerView
from twinpool.router.links.controller_directory import ControllerDirectory

OTHER_COUNTERS = 40
LINK_COUNTERS = ("writes", "busy_s", "waited_s", "opened", "under_way", "in_flight_bytes", "waiting", "plane_shm")
BEFORE_S = 30.0
"""Seconds for which the simulated cluster has run when the measurement begins."""
SETTLE_S = 6.0
"""Seconds after a change until the paces have changed, too."""


@dataclass
class Turn:
    """What one turn cost."""

    viewers: int
    share: float
    """Of a core, the controller's."""
    frames: int
    frame_bytes: float


class Scene:
    """The workers and routers of one controller."""

    def __init__(self, endpoint: str, prefill: int, decode: int, routers: int) -> None:
        self._rng, self._clock, self._config = random.Random(1), SystemClock(), ClusterConfig()
        self.cluster = SimulatedCluster(prefill, decode, routers=routers, grows=False)
        self._began = self._clock.now()
        self.directories = [ControllerDirectory(endpoint) for _ in range(routers)]
        self._endpoint = endpoint
        self._views: dict[WorkerName, WorkerView] = {}
        self._reports: list[RouterReport] = []
        self.frames = self.frame_bytes = 0

    async def start(self) -> None:
        self._step()
        for name, view in self._views.items():
            record = replace(
                view.record, incarnation=Incarnation(1), control="tcp://10.0.0.1:4", node_id="a" * 56,
                fingerprint=Fingerprint(9, "l" * 64, "n" * 120, "w" * 64), stream="10.0.0.1:3",
            )  # fmt: skip
            status, pause_s = partial(self._status, name), self._config.heartbeat_s
            keeper = LeaseKeeper(record, self._endpoint, self._clock, pause_s, status, print)
            await keeper.start(60.0)
        for directory in self.directories:
            directory.watch(lambda views: None)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._live())]
        self._tasks += [loop.create_task(self._report(index)) for index in range(len(self.directories))]

    async def _live(self) -> None:
        while True:
            self._step()
            await asyncio.sleep(1.0)

    def _step(self) -> None:
        self.cluster.run(BEFORE_S + self._clock.now() - self._began)
        self._views = {view.record.name: view for view in self.cluster.controller.views()}
        self._reports = self.cluster.reports()

    def _status(self, name: WorkerName) -> WorkerStatus:
        status = self._views[name].status
        counters = {**status.counters, **{f"counter_of_something_{i}": float(i) for i in range(OTHER_COUNTERS)}}
        for key in [key for key in counters if key.startswith("link_bytes:")]:
            to = key.partition(":")[2]
            counters |= {f"link_{what}:{to}": self._rng.random() for what in LINK_COUNTERS}
        return replace(status, counters=counters, incarnation=Incarnation(1), state="ready")

    async def _report(self, index: int) -> None:
        dashboard = self.directories[index].dashboard
        while True:
            pause_s = 1.0
            with suppress(ConnectionError):
                pause_s = await dashboard.report(self._reports[index])
            await asyncio.sleep(pause_s)

    async def view(self, index: int) -> None:
        """Look at one router's dashboard until cancelled."""
        dashboard = self.directories[index].dashboard
        while True:
            with suppress(ConnectionError):
                async for frame in dashboard.frames():
                    self.frames += 1
                    self.frame_bytes += len(frame)
            await asyncio.sleep(0.2)


async def _turns(options: argparse.Namespace, endpoint: str, pid: int) -> list[Turn]:
    scene, process = (
        Scene(endpoint, options.workers // 2, options.workers - options.workers // 2, options.viewers),
        psutil.Process(pid),
    )
    await scene.start()
    turns = []
    for _ in range(options.rounds):
        for viewers in (0, options.viewers):
            looking = [asyncio.create_task(scene.view(index)) for index in range(viewers)]
            await asyncio.sleep(SETTLE_S)
            frames, size = scene.frames, scene.frame_bytes
            cpu, at = sum(process.cpu_times()[:2]), time.monotonic()
            await asyncio.sleep(options.seconds)
            share = (sum(process.cpu_times()[:2]) - cpu) / (time.monotonic() - at)
            frames, size = scene.frames - frames, scene.frame_bytes - size
            turns.append(Turn(viewers, share, frames, size / frames if frames else 0.0))
            print(
                f"{viewers} viewers: {100 * share:.2f} % of a core, {frames / options.seconds:.1f} frames a second, "
                f"{turns[-1].frame_bytes / 1e3:.1f} kB each",
                flush=True,
            )
            for task in looking:
                task.cancel()
    return turns


def _start_workers(client: ControllerClient, count: int) -> None:
    """Have the controller order so many starts, and take the orders."""
    starts: dict[WorkerName, Incarnation] = {}
    client.supervise(lambda: list(starts.items()))
    client.add(Role.PREFILL, count // 2)
    client.add(Role.DECODE, count - count // 2)
    while len(starts) < count:
        for order in client.orders():
            if isinstance(order, StartWorker):
                starts[order.name] = order.incarnation
        threading.Event().wait(0.02)


def measure(options: argparse.Namespace, folder: Path) -> list[Turn]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        "twinpool.cluster.controller.controller_process",
        "--port",
        str(port),
        "--ledger",
        str(folder / "ledger"),
    ]
    with (folder / "log").open("wb") as log:
        controller = subprocess.Popen([sys.executable, "-m", *command], stderr=log)
    client = ControllerClient(f"127.0.0.1:{port}", 10.0)
    try:
        _start_workers(client, options.workers)
        return asyncio.run(_turns(options, f"127.0.0.1:{port}", controller.pid))
    finally:
        client.close()
        controller.terminate()
        controller.wait(10)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="bench.serving.dashboard_cost", description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(machine.headline())
    with tempfile.TemporaryDirectory() as folder:
        turns = measure(options, Path(folder))
    mean = {n: sum(t.share for t in turns if t.viewers == n) / options.rounds for n in (0, options.viewers)}
    cost = mean[options.viewers] - mean[0]
    print(f"{options.workers} workers: {options.viewers} viewers cost the controller {100 * cost:.2f} % of a core")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"turns": [vars(turn) for turn in turns], "cost": cost}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
