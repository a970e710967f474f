"""How late a worker renews its lease on a machine that has more to do than it can.

    python -m bench.serving.lease_under_load                       # a hundred busy processes for a minute
    python -m bench.serving.lease_under_load --busy 0 --seconds 20

A controller in a process, and a worker's lease keeper in another beside a thread that computes in Python all the while
and so holds the interpreter's lock as long as it may: both are production's. Busy processes have the same priority as
everything else, and the session of all (Linux divides a machine between sessions first). It is measured twice, with
leases' threads raised (`cluster.processes.priority`) where that is allowed, and without. A lease of 10 s is lost by a
gap of 9 s between two renewals that were granted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from bench.common.machine import headline
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_ledger import MemoryLedger
from twinpool.cluster.controller.controller_server import ControllerServer
from twinpool.cluster.processes.priority import LEASES, set_niceness
from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.cluster.worker_process.lease_keeper import LeaseKeeper
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

NAME = WorkerName("decode-0")


def be_controller(raised: bool) -> None:
    """Serve one worker's lease until standard input ends."""
    if raised:
        set_niceness(LEASES)
    core = Controller(SystemClock(), ClusterConfig(), MemoryLedger())
    server = ControllerServer(core)
    server.call(lambda core: core.pools.add(NAME, Role.DECODE))
    server.tick()
    sys.stdout.write(f"{server.endpoint}\n")
    sys.stdout.flush()
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not over.wait(0.1):
        server.tick()
    server.close()


def be_worker(endpoint: str, seconds: float, raised: bool) -> None:
    """Renew for so long beside a thread that computes; prints the seconds between grants."""
    loop = AsyncioThread("service", niceness=LEASES if raised else None)
    record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 1, "here", "", "", WorkerLimits(8, 8))
    status = WorkerStatus(NAME, Role.DECODE, "ready", 1, "here", Incarnation(1), 0, 0, 8, 8)
    granted: list[float] = []
    lost: list[str] = []
    clock, config = SystemClock(), ClusterConfig()
    keeper = LeaseKeeper(record, endpoint, clock, config.heartbeat_s, lambda: status, lost.append)
    grant = keeper.lease.granted

    def note(sent_at: float, lease_s: float) -> None:
        granted.append(clock.now())
        grant(sent_at, lease_s)

    keeper.lease.granted = note  # type: ignore[method-assign]
    loop.run(keeper.start(60.0), 65.0)
    sys.stdout.write("registered\n")
    sys.stdout.flush()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not lost:
        sum(range(1000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(granted)]
    sys.stdout.write(json.dumps({"gaps": [*gaps, clock.now() - granted[-1]], "lost": lost}) + "\n")
    sys.stdout.flush()


def measure(busy: int, seconds: float, raised: bool) -> dict[str, Any]:
    """One run: the seconds between renewals that were granted, and whether the lease was lost."""
    me = [sys.executable, "-m", "bench.serving.lease_under_load", *(["--raised"] if raised else [])]
    controller = subprocess.Popen([*me, "--be", "controller"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    endpoint = controller.stdout.readline().strip()
    command = [*me, "--be", endpoint, "--seconds", str(seconds)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    load: list[subprocess.Popen[Any]] = []
    try:
        worker.stdout.readline()  # Registered: only now, as it would take minutes to start beside the load.
        load += [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(busy)]
        found: dict[str, Any] = json.loads(worker.stdout.readline())
        return found
    finally:
        processes: list[subprocess.Popen[Any]] = [*load, worker, controller]
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, default=100, help="busy processes (100)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each run takes (60)")
    parser.add_argument("--raised", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--be", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "controller":
        be_controller(options.raised)
    elif options.be:
        be_worker(options.be, options.seconds, options.raised)
    else:
        print(headline())
        print(
            f"{options.busy} busy processes, {options.seconds:g} s; seconds between two renewals (0.5 configured)",
            flush=True,
        )
        for raised in (False, True):
            found = measure(options.busy, options.seconds, raised)
            gaps = sorted(found["gaps"])
            what = "raised" if raised else "not raised"
            late = gaps[int(0.99 * (len(gaps) - 1))]
            print(
                f"{what:>10}: median {statistics.median(gaps):.2f}, p99 {late:.2f}, longest {gaps[-1]:.2f}"
                f"{', LOST: ' + found['lost'][0] if found['lost'] else ''}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
