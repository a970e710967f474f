"""A simulated cluster on the dashboard: as many workers as asked for, a quarter of an hour of load, and what follows.

The page, the router that serves it, the controller, its autoscaler and the frames are production's; workers and what
they compute are models, in virtual time that keeps pace with the clock (`sim.scale.cluster_model`). For looking at the
page with more workers than a machine has, and for its pictures in docs/:

    python -m docs.simulated_dashboard --prefill 32 --decode 32 --port 8390
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from bench.common.random_model import DEMO
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.dashboard_feed import RecordBoard, dashboard_of
from twinpool.cluster.dashboard.cluster_frames import KEPT_S, EventKind
from twinpool.cluster.dashboard.frame_rows import SHOWN
from twinpool.cluster.serve.serve_one_process import LocalDirectory
from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.contracts.messages.router_report import BOUNDS_S, BUCKETS, COUNTERS, LatencyShape, RouterReport
from twinpool.router.api.app import create_app
from twinpool.router.api.router_server import RouterServer
from twinpool.router.links.controller_port import ControllerPorts
from twinpool.router.main import listen
from twinpool.router.records.make_record import RecordDraft, make_record
from twinpool.router.service.router_service import RouterService
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.scale_figures import MIDDLES_S, EndedRequest, GapHistogram
from twinpool.sim.scale.traffic import TrafficBurst, TrafficShape, drawn

MODEL = "simulated"
POSITION_BYTES = 98_304
"""As of a model of 48 layers whose 4 heads of keys and values have 128 numbers of 2 bytes each."""
RATE = 1.1
"""Requests a second for each prefill worker, outside of bursts."""
PROMPTS = (180, 420, 800, 1200, 1900, 2600, 3500, 4800, 6400)
ANSWERS = (40, 90, 160, 240, 320, 400, 480, 560, 640)
BURSTS = ((90.0, 150.0, 1.35), (420.0, 120.0, 1.6), (640.0, 90.0, 1.3), (860.0, 200.0, 1.4))
"""When they begin, how long they are, and their factor; again after each `BURSTS_S`."""
BURSTS_S, HOURS = 1200.0, 2.0
PAST_S = KEPT_S + 30.0
PAST_STEP_S = 0.5
DRAINS_AT_S = PAST_S - 2.0
TICK_S = 0.1
REPORT_S = 1.0


def traffic(prefill: int, seed: int) -> TrafficShape:
    """Load that rises and falls, for so many prefill workers."""
    seconds = 3600 * HOURS
    bursts = tuple(
        TrafficBurst(again * BURSTS_S + at, lasts, factor)
        for again in range(int(seconds / BURSTS_S))
        for at, lasts, factor in BURSTS
    )
    more = sum((burst.factor - 1) * burst.seconds for burst in bursts)
    return TrafficShape(
        int(RATE * prefill * (seconds + more)), seconds, seed, prompts=PROMPTS, answers=ANSWERS, answer_limit=1024,
        think_s=20.0, tenants=3, bursts=bursts,
    )  # fmt: skip


def shape_of(gaps: GapHistogram) -> list[int]:
    """The counts of a histogram in the buckets of `contracts.messages.router_report`."""
    buckets = np.searchsorted(BOUNDS_S, MIDDLES_S)
    return [int(n) for n in np.bincount(buckets, gaps.counts, minlength=BUCKETS)]


class _RouterTally:
    """What one simulated router has counted."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.first_tokens, self.output_tokens = LatencyShape(), LatencyShape()


class SimulatedCluster:
    """A run, and what its routers would tell the controller. Implements `sim.scale.scale_figures.RunWatcher`."""

    def __init__(
        self, prefill: int, decode: int, *, routers: int = 2, seed: int = 1, wall: float = 0.0, grows: bool = True
    ) -> None:
        """`wall`: seconds since 1970 when the virtual clock begins. `grows`: whether the autoscaler has yet to add the
        last prefill worker."""
        first = max(1, prefill - 1) if grows else prefill
        scaling: dict[str, Any] = {
            "enabled": grows,
            "ttft_target_s": 3.0,
            "itl_target_s": 0.06,
            "shrink_window_s": 7200,
        }
        scaling |= {"prefill": {"min_workers": first, "max_workers": max(1, prefill)}}
        scaling |= {"decode": {"min_workers": 1, "max_workers": decode}}
        config = config_from_dict({"autoscaling": scaling, "cluster": {"name": "simulated"}})
        plan = ClusterPlan(
            PrefillPool(first, 1 << 16, 1 << 18), DecodePool(decode, 1 << 17), routers=routers, config=config,
            position_bytes=POSITION_BYTES,
        )  # fmt: skip
        self.model = ClusterModel(plan, drawn(traffic(prefill, seed)), seed)
        self.model.watcher = self
        self._wall = wall
        self.records = RecordBoard(self.wall)
        self._tallies = [_RouterTally() for _ in range(routers)]
        self._drafts: deque[RecordDraft] = deque(maxlen=SHOWN)
        """Of the latest requests that have ended since the last `run`."""

    @property
    def controller(self) -> Controller:
        return self.model.pools.core

    def wall(self) -> float:
        """Seconds since 1970, by the virtual clock."""
        return self._wall + self.model.clock.now()

    def run(self, until_s: float) -> None:
        """Go on until this time of the virtual clock."""
        self.model.run(until_s)
        now = self.model.clock.now()
        self.model.clock.advance(max(0.0, until_s - now))
        self.records.take([make_record(draft) for draft in self._drafts], ())
        self._drafts.clear()

    def reports(self) -> list[RouterReport]:
        """What each router would report now. The models don't know whose tokens they draw: each router has an equal
        part of them, and of the times between them."""
        count, figures = len(self._tallies), self.model.figures
        now = self.model.clock.now()
        decoders = [one.decode for one in self.model.pools.workers.values() if one.decode is not None]
        under_way = sum(decode.generated_by(now) - decode.generated for decode in decoders)
        firsts = sum(sum(tally.first_tokens.counts) for tally in self._tallies)
        generated = firsts + int(figures.gaps.total) + under_way
        gaps = tuple(n // count for n in shape_of(figures.gaps))
        return [
            RouterReport(
                f"start-{number}", "simulated", 3100 + number, build_id(), MODEL, core.requests.in_flight,
                core.requests.waiting, tally.counters | {"generated_tokens": generated // count},
                tuple(tally.first_tokens.counts), gaps, output_tokens=tuple(tally.output_tokens.counts),
            )
            for number, (core, tally) in enumerate(zip(self.model.cores, self._tallies, strict=True))
        ]  # fmt: skip

    # ------------------------------------------------------------ the run tells

    def came(self, router: int) -> None:
        self._tallies[router].counters["requests_submitted"] += 1

    def refused(self, router: int) -> None:
        self._tallies[router].counters["refused_early"] += 1

    def first_token(self, router: int, seconds: float, held: int) -> None:
        tally = self._tallies[router]
        tally.first_tokens.observe(seconds)
        tally.counters["prompt_tokens_cached"] += held

    def ended(self, ended: EndedRequest) -> None:
        counters, r = self._tallies[ended.router].counters, ended.routed
        counters["requests_ended"] += 1
        counters["requests_failed"] += ended.done.error is not None
        counters["transfer_bytes"] += sum(report.transfer_bytes for report in r.progress)
        generated = ended.request.answer if ended.done.error is None else 0
        if generated > 1 and ended.first_at is not None:
            pace_s = (ended.ended_at - ended.first_at) / (generated - 1)
            self._tallies[ended.router].output_tokens.observe(pace_s)
        self._drafts.append(
            RecordDraft(
                f"start-{ended.router}", MODEL, r.id, r.id, "", ended.request.tenant, "", "", False, r.arrived,
                r.arrived, ended.ended_at, ended.first_at, self._wall + r.arrived, ended.done.reason,
                ended.done.message, len(r.prompt), generated, r.attempts, r.migrations, r.journal.entries,
                r.journal.choices, r.progress, r.journal.left_out,
            )
        )  # fmt: skip


class SimulatedDashboard:
    """Implements `router.links.controller_port.DashboardSource` over a simulated cluster, which goes on as the clock
    does. It begins with a quarter of an hour that has passed, at whose end a decode worker drains."""

    def __init__(self, cluster: SimulatedCluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        plane = ControlPlane("10.0.0.4:7400", 1, ("10.0.0.5:7400",))
        model = cluster.model
        self._feed = dashboard_of(
            cluster.controller, model.pools.autoscaler, lambda: plane, cluster.records, model.clock, cluster.wall
        )
        self._ticker: asyncio.Task[None] | None = None
        self._reported = 0.0
        at = 0.0
        while at < PAST_S:
            at += PAST_STEP_S
            self._go_on(at)
            if at - PAST_STEP_S < DRAINS_AT_S <= at:
                self._drain_one()
        self._began = clock.now()

    def _drain_one(self) -> None:
        views = self._cluster.controller.views()
        decode = [view.record.name for view in views if view.record.role is Role.DECODE]
        if len(decode) > 1:
            self._feed.frames.log.add(self._cluster.wall(), EventKind.OPERATOR, f"an operator drains {decode[-1]}")
            self._cluster.controller.pools.drain(decode[-1])

    def _go_on(self, until_s: float) -> None:
        self._cluster.run(until_s)
        if until_s >= self._reported + REPORT_S:
            self._reported = until_s
            for report in self._cluster.reports():
                self._feed.report(report)
        self._feed.tick()

    async def frames(self) -> AsyncIterator[bytes]:
        async for frame in self._feed.watch():
            yield frame

    async def past(self) -> bytes:
        return self._feed.past()

    async def routers(self) -> list[RouterReport]:
        return []

    async def report(self, report: RouterReport) -> float:
        if self._ticker is None:
            self._began = self._clock.now()
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        return 10.0  # What the real router counts is nothing.

    async def _tick(self) -> None:
        while True:
            self._go_on(PAST_S + self._clock.now() - self._began)
            await asyncio.sleep(TICK_S)


def router_of(cluster: SimulatedCluster) -> RouterService:
    """A real router whose dashboard shows the simulated cluster, and which has no workers."""
    return RouterService(
        read_model_spec(DEMO),
        Config(),
        LocalDirectory([]),
        ports=ControllerPorts(dashboard=SimulatedDashboard(cluster, SystemClock())),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Serve the dashboard of a simulated cluster.")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    with listen("127.0.0.1", args.port) as bound:
        cluster = SimulatedCluster(
            args.prefill, args.decode, routers=args.routers, seed=args.seed, wall=time.time() - PAST_S
        )
        service = router_of(cluster)
        print(f"http://127.0.0.1:{bound.getsockname()[1]}/dashboard", flush=True)
        RouterServer(create_app(service), service).run([bound])
    return 0


if __name__ == "__main__":
    sys.exit(main())
