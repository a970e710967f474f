"""A made-up cluster for the dashboard: as many workers as asked for, a quarter of an hour of load, drains and a death.

The page and the router that serves it are real; what the router's dashboard is told comes from `MadeUpCluster` instead
of a controller. For looking at the page with more workers than a machine has, and for its pictures in docs/:

    python -m bench.serving.dashboard_frames --prefill 32 --decode 32 --port 8390
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from bench.common.random_model import DEMO
from cluster.dashboard.cluster_frames import ClusterFrames, ClusterState
from cluster.dashboard.dashboard_feed import DashboardFeed
from cluster.dashboard.event_log import EventKind
from cluster.dashboard.history import KEPT_S
from cluster.dashboard.request_rows import SHOWN
from cluster.dashboard.worker_rates import WorkerSample
from cluster.serve.local_directory import LocalDirectory
from contracts.checkpoint.model_spec import read_model_spec
from contracts.clock import Clock, ManualClock, SystemClock
from contracts.config.cluster_config import Config
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.autoscaler_messages import AutoscalerView, PoolSizing
from contracts.messages.control_plane import ControlPlane
from contracts.messages.latency_shape import LatencyShape
from contracts.messages.request_record import RecordEvent, RecordSpan, RequestRecord
from contracts.messages.router_report import COUNTERS, RouterReport
from contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from router.api.app import create_app
from router.api.router_server import RouterServer
from router.main import listen
from router.service.controller_ports import ControllerPorts
from router.service.router_service import RouterService

PAGES, HOST_PAGES = 4096, 16384
PAGE_BYTES = 98_304
PAGE_TOKENS = 16
TICK_S = 0.1
PAST_STEP_S = 2.5
BUILD = "0.1.0+6012d5eb02"


class _Worker:
    """One made-up worker."""

    def __init__(self, role: Role, number: int, node: str) -> None:
        self.name, self.role, self.node = WorkerName(f"{role}-{number}"), role, node
        self.incarnation, self.state = 1, "ready"
        self.last_end = ""
        self.running = self.waiting = self.held = self.cached = 0
        self.counts: dict[str, float] = dict.fromkeys(
            ("tokens_generated", "prompt_tokens_computed", "hit_tokens_device", "hit_tokens_host"), 0.0
        )
        self.bias = 1.0

    def view(self) -> WorkerView:
        incarnation, none = Incarnation(self.incarnation), WorkerLimits(0, 0)
        record = WorkerRecord(
            self.name, self.role, incarnation, 4000, self.node, "127.0.0.1:1", "", none, settings="a1", build=BUILD
        )
        live = self.state in ("ready", "draining")
        free = PAGES - self.held
        counters = self.counts | {
            "device_pages_unused": max(0, free - self.cached),
            "host_pages_total": HOST_PAGES,
            "host_pages_used": min(HOST_PAGES, 3 * self.cached),
            "host_pages_swapped": 0,
        }
        status = WorkerStatus(
            self.name, self.role, self.state, 4000, self.node, incarnation, self.running if live else 0,
            self.waiting if live else 0, PAGES if live else 0, free if live else 0, counters=counters if live else {},
            plane="shm", last_end=self.last_end, outgoing=2 if self.role is Role.PREFILL and live else 0,
        )  # fmt: skip
        return WorkerView(record, status)


class MadeUpCluster:
    """Workers and routers under a load that rises and falls; the same for the same seed."""

    def __init__(self, prefill: int, decode: int, *, routers: int = 2, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        nodes = max(1, (prefill + decode) // 8)
        self.workers = [_Worker(Role.PREFILL, i, f"node-{i % nodes}") for i in range(prefill)]
        self.workers += [_Worker(Role.DECODE, i, f"node-{(prefill + i) % nodes}") for i in range(decode)]
        for worker in self.workers:
            worker.bias = self._rng.uniform(0.75, 1.3)
        self._routers = [
            (f"start-{i}", dict.fromkeys(COUNTERS, 0), LatencyShape(), LatencyShape()) for i in range(routers)
        ]
        self._scale = (prefill + decode) / 8
        self._requests: deque[RequestRecord] = deque(maxlen=SHOWN)
        self._count_requests = 0
        self.load = 0.0

    def step(self, now: float, seconds: float, wall: float) -> None:
        """Let `seconds` pass. `wall`: seconds since 1970."""
        rng, scale = self._rng, self._scale
        wave = 0.62 + 0.25 * math.sin(now / 140) + 0.11 * math.sin(now / 31) + rng.gauss(0, 0.02)
        self.load = max(0.05, wave)
        for _ in range(2):
            self._finish(wall)
        prompts = [w for w in self.workers if w.role is Role.PREFILL and w.state == "ready"]
        answers = [w for w in self.workers if w.role is Role.DECODE and w.state in ("ready", "draining")]
        requests = 9.0 * scale * self.load
        for worker in self.workers:
            load = self.load * worker.bias
            if worker.role is Role.PREFILL:
                worker.running = round(2.4 * load + rng.random())
                worker.waiting = max(0, round(5 * (load - 0.85) + rng.gauss(0, 0.6)))
                worker.held = min(PAGES, int(PAGES * (0.06 + 0.16 * load)))
                worker.cached = int(PAGES * (0.45 + 0.1 * math.sin(now / 300 + worker.bias)))
                tokens = 9000 * load * seconds if worker in prompts else 0.0
                worker.counts["prompt_tokens_computed"] += tokens * 0.58
                worker.counts["hit_tokens_device"] += tokens * (0.3 + 0.09 * math.sin(now / 90))
                worker.counts["hit_tokens_host"] += tokens * 0.08
                self._send(worker, answers, tokens)
            else:
                worker.running = round(22 * load + rng.gauss(0, 1.2))
                worker.waiting = max(0, round(3 * (load - 0.95)))
                worker.held = min(PAGES - 40, int(PAGES * 0.7 * load))
                worker.cached = int((PAGES - worker.held) * 0.5)
                worker.counts["tokens_generated"] += 28 * max(0, worker.running) * seconds
        self._count(requests * seconds, sum(28 * max(0, w.running) for w in answers) * seconds)

    def _send(self, worker: _Worker, answers: Sequence[_Worker], tokens: float) -> None:
        if tokens and answers:
            for peer in self._rng.sample(answers, min(len(answers), 3)):
                key = f"link_bytes:{peer.name}"
                written = tokens / PAGE_TOKENS * PAGE_BYTES / 3 * self._rng.uniform(0.4, 1.6)
                worker.counts[key] = worker.counts.get(key, 0.0) + written

    def _count(self, requests: float, tokens: float) -> None:
        for index, (_, counters, first, gaps) in enumerate(self._routers):
            share = (0.56, 0.44)[index % 2] * 2 / len(self._routers) if len(self._routers) > 1 else 1.0
            came = int(requests * share + self._rng.random())
            counters["requests_submitted"] += came
            counters["requests_ended"] += came
            counters["generated_tokens"] += int(tokens * share)
            counters["prompt_tokens_cached"] += int(400 * came)
            counters["audits_equal"] += self._rng.random() < came / 100
            for _ in range(min(came, 40)):
                first.observe(0.045 * math.exp(self._rng.gauss(1.1 * self.load, 0.45)))
            for _ in range(60):
                gaps.observe(0.017 * math.exp(self._rng.gauss(0.5 * self.load, 0.22)))

    def state(self, now: float) -> ClusterState:
        """The cluster now; `now`: when its counters were said."""
        control = ControlPlane("10.0.0.4:7400", 3, ("10.0.0.5:7400", "10.0.0.6:7400"))
        ready = {role: sum(w.role is role and w.state == "ready" for w in self.workers) for role in Role}
        scaler = AutoscalerView(
            tuple(
                PoolSizing(role, ready[role], ready[role], 1, 2 * max(1, ready[role]), ready[role] * self.load, why)
                for role, why in (
                    (Role.PREFILL, "11.2 k prompt tokens a second are offered"),
                    (Role.DECODE, "71 % of pages at the window's peak"),
                )
            ),
            counters={"grown": 2, "shrunk": 1, "role_changes": 1},
        )
        workers = [WorkerSample(w.view(), now) for w in self.workers]
        return ClusterState(workers, scaler, control, deaths=1, requests=list(self._requests)[::-1])

    def _finish(self, wall: float) -> None:
        """Add the record of a request that ends now."""
        rng = self._rng
        prefill = rng.choice([w.name for w in self.workers if w.role is Role.PREFILL] or [""])
        decode = rng.choice([w.name for w in self.workers if w.role is Role.DECODE] or [""])
        prompt, generated = rng.randint(200, 6000), rng.randint(20, 400)
        at, spans = 0.0, list[RecordSpan]()
        parts = [
            ("tokenise", rng.uniform(0.001, 0.003), "", ""),
            ("prefill_queue", rng.expovariate(1 / (0.05 * self.load)), prefill, ""),
            (
                "prefill",
                prompt / 9000,
                prefill,
                f"{prompt * 6 // 10} tokens computed, cached: {prompt * 4 // 10} of device",
            ),
            ("handover", rng.uniform(0.001, 0.02), decode, f"{prompt // PAGE_TOKENS * PAGE_BYTES} bytes"),
            ("decode", generated * rng.uniform(0.017, 0.024), decode, ""),
            ("answer", 0.002, "", ""),
        ]
        for name, seconds, worker, detail in parts:
            spans.append(RecordSpan(name, round(at, 5), round(at + seconds, 5), worker, detail))
            at += seconds
        begins, ends = spans[2].start_s + 0.02, spans[3].start_s
        if ends > begins:
            spans.append(RecordSpan("transfer", begins, ends, decode, parts[3][3], hidden=True))
        self._count_requests += 1
        self._requests.append(
            RequestRecord(
                f"{self._rng.getrandbits(64):016x}-0",
                "",
                "",
                f"router-{self._count_requests % len(self._routers)}",
                "Qwen3-30B-A3B",
                rng.choice(("", "search", "batch")),
                wall - at,
                at,
                spans[4].start_s + 0.02,
                rng.choice(("stop", "stop", "length")),
                prompt_tokens=prompt,
                cached_tokens={"device": prompt * 4 // 10},
                generated=generated,
                spans=tuple(spans),
                events=(RecordEvent(0.0, "placed", prefill), RecordEvent(spans[3].end_s, "handed over", decode)),
            )
        )

    def reports(self) -> list[RouterReport]:
        running = sum(w.running for w in self.workers if w.role is Role.DECODE)
        return [
            RouterReport(
                name, f"node-{i}", 3100 + i, BUILD, "Qwen3-30B-A3B", running // len(self._routers), 0, dict(counters),
                tuple(first.counts), tuple(gaps.counts),
            )
            for i, (name, counters, first, gaps) in enumerate(self._routers)
        ]  # fmt: skip


class MadeUpDashboard:
    """Implements `router.service.dashboard_source.DashboardSource` over a made-up cluster."""

    def __init__(self, made_up: MadeUpCluster, clock: Clock) -> None:
        """Begins with a quarter of an hour that has passed."""
        self._cluster, self._clock = made_up, clock
        past, now, wall = ManualClock(clock.now() - KEPT_S - 30), clock.now(), time.time()
        frames = ClusterFrames("production", secrets.token_hex(8), BUILD, past.now())
        self._feed = DashboardFeed(frames, lambda: self._cluster.state(self._clock.now()), clock, time.time)
        self._script = self._plot(now)
        for _ in range(int((KEPT_S + 30) / PAST_STEP_S)):
            past.advance(PAST_STEP_S)
            self._step(past.now(), PAST_STEP_S, wall - now + past.now())
            frames.take(made_up.state(past.now()), past.now(), wall - now + past.now())
        self._last = now
        self._ticker: asyncio.Task[None] | None = None

    def _plot(self, now: float) -> list[tuple[float, EventKind, str, str]]:
        """What happens when: to a worker, by an operator, by the autoscaler. Seconds before now."""
        decode = [w for w in self._cluster.workers if w.role is Role.DECODE]
        if len(self._cluster.workers) < 4:
            return []
        victim, leaver = decode[1].name, decode[-1].name
        death = "no heartbeat for 10 s"
        return [
            (now - 760, EventKind.OPERATOR, "an operator has scaled decode to more", ""),
            (now - 610, EventKind.SCALE, "prefill 3 -> 4: the queue would take 2.1 s, and 1.0 s is allowed", ""),
            (now - 420, EventKind.WORKER, f"{victim} died ({death}); restarting, incarnation 2", f"{victim} dead"),
            (now - 418, EventKind.WORKER, "", f"{victim} starting"),
            (now - 404, EventKind.WORKER, f"{victim} is back, incarnation 2", f"{victim} ready"),
            (now - 35, EventKind.OPERATOR, f"an operator drains {leaver}", ""),
            (now - 34, EventKind.WORKER, "", f"{leaver} draining"),
        ]

    def _step(self, now: float, seconds: float, wall: float) -> None:
        while self._script and self._script[0][0] <= now:
            _, kind, text, change = self._script.pop(0)
            if text:
                self._feed.frames.log.add(wall, kind, text)
            if change:
                name, state = change.split()
                worker = next(w for w in self._cluster.workers if w.name == name)
                if state == "starting":
                    worker.incarnation += 1
                    worker.counts = dict.fromkeys(worker.counts, 0.0)
                    worker.last_end = "no heartbeat for 10 s"
                worker.state = state
        self._cluster.step(now, seconds, wall)
        for report in self._cluster.reports():
            self._feed.frames.report(report, now, wall)

    async def frames(self) -> AsyncIterator[bytes]:
        async for frame in self._feed.watch():
            yield frame

    async def past(self) -> bytes:
        return self._feed.past()

    async def routers(self) -> list[RouterReport]:
        return []

    async def report(self, report: RouterReport) -> float:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        return 10.0  # What the real router counts is nothing.

    async def _tick(self) -> None:
        while True:
            now = self._clock.now()
            if now - self._last >= 1.0:
                self._step(now, now - self._last, time.time())
                self._last = now
            self._feed.tick()
            await asyncio.sleep(TICK_S)


def router_of(made_up: MadeUpCluster) -> RouterService:
    """A real router whose dashboard shows the made-up cluster, and which has no workers."""
    return RouterService(
        read_model_spec(DEMO),
        Config(),
        LocalDirectory([]),
        ports=ControllerPorts(dashboard=MadeUpDashboard(made_up, SystemClock())),
    )


def serve(made_up: MadeUpCluster, bound: socket.socket) -> None:
    """Serve the dashboard of a made-up cluster until SIGTERM or SIGINT."""
    service = router_of(made_up)
    RouterServer(create_app(service), service).run([bound])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve the dashboard of a made-up cluster.")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    with listen("127.0.0.1", args.port) as bound:
        print(f"http://127.0.0.1:{bound.getsockname()[1]}/dashboard", flush=True)
        serve(MadeUpCluster(args.prefill, args.decode, routers=args.routers, seed=args.seed), bound)
    return 0


if __name__ == "__main__":
    sys.exit(main())
