"""The control plane at a thousand workers: what the controller's process, its messages and a router's table cost.

    python -m bench.serving.control_plane [--workers 1000] [--routers 2] [--seconds 15]

A real controller process with its ledger, and so many workers' lease keepers (production's) in processes of their own,
whose statuses change as those of busy workers do. It prints the controller's share of a core and its bytes a second for
heartbeats and for routers' tables, and what a router's process spends on its table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.controller_client import ControllerClient
from twinpool.cluster.worker_process.lease_keeper import LeaseKeeper
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.router.links.controller_directory import ControllerDirectory

COUNTERS = 40
"""Counters of a status, about as many as a decode worker has."""
SHARDS = 2
"""Processes among which the lease keepers are divided."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="bench.serving.control_plane", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--part", choices=("workers", "router"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part == "workers":
        return asyncio.run(_be_workers(options))
    if options.part == "router":
        return asyncio.run(_be_router(options))
    with tempfile.TemporaryDirectory() as folder:
        return _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint, parts = f"127.0.0.1:{port}", list[subprocess.Popen[str]]()
    controller = subprocess.Popen(
        [
            *(sys.executable, "-m", "twinpool.cluster.controller.controller_process", "--port", str(port)),
            *("--ledger", str(folder / "ledger")),
        ],
        stderr=(folder / "log").open("wb"),
    )
    client = ControllerClient(endpoint, 10.0)
    try:
        starts: dict[WorkerName, Incarnation] = {}
        client.supervise(lambda: list(starts.items()))
        half = options.workers // 2
        client.add(Role.PREFILL, half)
        client.add(Role.DECODE, options.workers - half)
        pause = threading.Event()
        while len(starts) < options.workers:
            for order in client.orders():
                if isinstance(order, StartWorker):
                    starts[order.name] = order.incarnation
            pause.wait(0.02)
        began = time.monotonic()
        parts += [_part("workers", options, endpoint, shard) for shard in range(SHARDS)]
        while sum(view.status.state == "ready" for view in client.views()) < options.workers:
            pause.wait(0.2)
        print(f"{options.workers} workers registered in {time.monotonic() - began:.1f} s, {SHARDS} processes of them")
        routers = [_part("router", options, endpoint, number) for number in range(options.routers)]
        parts += routers
        pause.wait(3.0)
        process = psutil.Process(controller.pid)
        cpu, at = sum(process.cpu_times()[:2]), time.monotonic()
        for part in parts:
            part.send_signal(10)
        pause.wait(options.seconds)
        seconds = time.monotonic() - at
        spent = sum(process.cpu_times()[:2]) - cpu
        for part in parts:
            part.send_signal(12)
        told = [json.loads(part.communicate(timeout=30)[0].splitlines()[-1]) for part in parts]
        renewals = sum(one.get("renewals", 0) for one in told)
        print(
            f"controller: {100 * spent / seconds:.1f} % of a core, {1e6 * spent / renewals:.0f} us a heartbeat, "
            f"{renewals / seconds:.0f} heartbeats a second, {process.memory_info().rss / 2**20:.0f} MiB"
        )
        for number, one in enumerate(told[SHARDS:]):
            print(
                f"router {number}: {100 * one['cpu'] / seconds:.1f} % of a core for its table, "
                f"{one['views'] / seconds:.1f} views a second, {one['bytes'] / seconds / 1e3:.0f} kB a second"
            )
        return 0
    finally:
        for part in parts:
            part.kill()
        client.close()
        controller.terminate()
        controller.wait(10)


def _part(part: str, options: argparse.Namespace, endpoint: str, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "bench.serving.control_plane", "--part", part, "--endpoint", endpoint),
            *("--workers", str(options.workers), "--shard", str(number)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )


async def _be_workers(options: argparse.Namespace) -> int:
    """Be a share of the workers: each has a lease, and a status that changes with every heartbeat."""
    half = options.workers // 2
    names = [f"prefill-{i}" for i in range(half)] + [f"decode-{i}" for i in range(options.workers - half)]
    rng, clock, config = random.Random(options.shard), SystemClock(), ClusterConfig()
    keepers, renewals = [], 0
    for name in names[options.shard :: SHARDS]:
        role = Role(name.partition("-")[0])
        record = WorkerRecord(
            WorkerName(name), role, Incarnation(1), os.getpid(), f"host-{name}", "10.0.0.1:40001", "tcp://10.0.0.1:40002",
            WorkerLimits(131072, 131072), "a" * 56, Fingerprint(9, "l" * 64, "n" * 120, "w" * 64), "10.0.0.1:40003",
        )  # fmt: skip
        counters = {f"counter_of_something_{i}": float(rng.randrange(10**6)) for i in range(COUNTERS)}

        def status(record: WorkerRecord = record, counters: dict[str, float] = counters) -> WorkerStatus:
            nonlocal renewals
            renewals += 1
            counters["counter_of_something_0"] += 1
            free = rng.randrange(10_000)
            return WorkerStatus(
                record.name, record.role, "ready", 7, record.node, record.incarnation, rng.randrange(64),
                rng.randrange(8), 10_000, free, int(counters["counter_of_something_0"]), 3, dict(counters),
            )  # fmt: skip

        keepers.append(LeaseKeeper(record, options.endpoint, clock, config.heartbeat_s, status, print))
    for keeper in keepers:
        await keeper.start(60.0)
    loop, began, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(10, began.set)
    loop.add_signal_handler(12, ended.set)
    await began.wait()
    before = renewals
    await ended.wait()
    print(json.dumps({"renewals": renewals - before}), flush=True)
    return 0


class CountingDirectory(ControllerDirectory):
    """A router's table that counts what comes."""

    views = bytes = 0

    def _take(self, message: pb.ClusterView) -> None:
        self.views, self.bytes = self.views + 1, self.bytes + message.ByteSize()
        super()._take(message)


async def _be_router(options: argparse.Namespace) -> int:
    """Be a router as far as its table goes; between SIGUSR1 and SIGUSR2 count what that costs."""
    directory = CountingDirectory(options.endpoint)
    loop, began, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(10, began.set)
    loop.add_signal_handler(12, ended.set)
    directory.watch(lambda views: None)
    await began.wait()
    cpu, views, heard = time.process_time(), directory.views, directory.bytes
    await ended.wait()
    print(
        json.dumps(
            {"cpu": time.process_time() - cpu, "views": directory.views - views, "bytes": directory.bytes - heard}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
