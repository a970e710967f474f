"""When what has died is started again: workers, the router, the arena agent."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.serve.services import service_context
from twinpool.cluster.arena.local_agent import LocalArenaAgent
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.serve import router_services
from twinpool.cluster.serve.detached_state import ServiceProcess
from twinpool.cluster.serve.router_services import RouterCommand, RouterServices, RoutersPlan
from twinpool.cluster.serve.service import PartFailed
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig, Config

DAY_S = 86_400.0
CONFIG = ClusterConfig(restart_limit=20, restart_window_s=600.0)


def test_one_death_a_day_is_never_too_many() -> None:
    restarts = RestartHistory(CONFIG)
    for day in range(1000):
        assert restarts.died(day * DAY_S, (day - 1) * DAY_S) == 0.0
        assert not restarts.too_many


def test_deaths_in_a_row_wait_longer_and_are_too_many_in_the_end() -> None:
    restarts, now, waits = RestartHistory(CONFIG), 0.0, []
    while not restarts.too_many:
        waits.append(restarts.died(now, None))
        now += waits[-1]
    assert waits[:4] == [0.0, 0.5, 1.0, 2.0]
    assert max(waits) == 10.0
    assert len(waits) == CONFIG.restart_limit + 1


def test_deaths_that_an_operator_forgives_count_no_more_and_neither_does_their_pause() -> None:
    restarts = RestartHistory(CONFIG)
    while not restarts.too_many:
        restarts.died(0.0, None)
    restarts.forgive()
    assert (restarts.deaths, restarts.too_many) == (0, False)
    assert restarts.died(1.0, None) == 0.0
    assert restarts.deaths == 1


class FakeRouter(router_services.Router):
    """A router whose process dies so long after each of its starts."""

    clock: ManualClock
    look_s: float
    """How long a look at it takes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.started: list[float] = []
        self.dead, self.kills = True, 0

    def lives_s(self, start: int) -> float:
        raise NotImplementedError

    def ended(self) -> str | None:
        self.clock.advance(self.look_s)
        if not self.dead and self.clock.now() - self.started[-1] >= self.lives_s(len(self.started)):
            self.dead = True
        return "signal 9" if self.dead else None

    def kill(self) -> None:
        self.dead, self.kills = True, self.kills + 1

    def _spawn(self) -> tuple[int, int]:
        assert self.dead, "one at a time"
        self.dead = False
        self.started.append(self.clock.now())
        return len(self.started), 1

    @property
    def process(self) -> ServiceProcess:
        return ServiceProcess(len(self.started), 1, "a build")

    def stop(self, timeout_s: float) -> None: ...


class Probe:
    """A router that answers, unless it hangs."""

    hangs = False

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def started_again(self) -> None: ...

    @property
    def silent_s(self) -> float:
        return 1e9 if self.hangs else 0.0


@dataclass
class Run:
    """A supervisor and its one router."""

    monkeypatch: pytest.MonkeyPatch
    folder: Path
    clock: ManualClock = field(default_factory=ManualClock)
    lines: list[str] = field(default_factory=list)

    def begin(self, lives_s: Callable[[int], float], look_s: float = 0.1, hangs: bool = False) -> FakeRouter:
        members = {"clock": self.clock, "look_s": look_s, "lives_s": lambda router, start: lives_s(start)}
        self.monkeypatch.setattr(router_services, "Router", type("R", (FakeRouter,), members))
        self.monkeypatch.setattr(router_services, "RouterProbe", type("P", (Probe,), {"hangs": hangs}))
        options, spec = types.SimpleNamespace(routers=1, host="127.0.0.1"), types.SimpleNamespace(path="model")
        prepared: Any = types.SimpleNamespace(config=Config(cluster=CONFIG), options=options, spec=spec, port=0)
        stack = ExitStack()
        context = service_context(self.folder, self.clock, self.lines.append, stack, config=CONFIG)
        self.routers = RouterServices(context, RoutersPlan.of(prepared), self.folder)
        self.routers.start(RouterCommand([], {}, ()))
        (router,) = self.routers.services()
        assert isinstance(router, FakeRouter)
        return router

    def until_started(self, router: FakeRouter, times: int) -> None:
        """Keep it alive until it has been started again so often, or it is given up."""
        while len(router.started) <= times:
            self.clock.advance(0.1)
            self.routers.tend()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return Run(monkeypatch, tmp_path)


def test_a_router_that_dies_once_a_day_does_not_end_the_cluster(run: Run) -> None:
    router = run.begin(lambda start: 0.0, look_s=DAY_S)
    run.until_started(router, 100)
    assert len(run.lines) == 100
    assert run.lines[-1] == "router died (signal 9); restarting"


def test_a_router_that_dies_at_once_again_and_again_ends_the_cluster_and_waits_in_between(run: Run) -> None:
    router = run.begin(lambda start: 0.0)
    with pytest.raises(PartFailed, match="too often"):
        run.until_started(router, 1000)
    assert len(router.started) == 1 + CONFIG.restart_limit
    gaps = [after - before for before, after in zip(router.started, router.started[1:], strict=False)]
    assert gaps[-1] >= 10.0 > gaps[0]


def test_a_router_that_hangs_is_killed_once_and_not_while_it_is_away(run: Run) -> None:
    router = run.begin(lambda start: 1e9, hangs=True)
    run.until_started(router, 4)
    assert router.kills == len(router.started) - 1 == sum("hung" in line for line in run.lines)


def test_an_arena_agent_that_dies_once_a_day_is_always_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, started = ManualClock(), []
    agent = LocalArenaAgent("", tmp_path, ClusterConfig(restart_limit=3), clock)
    dead = types.SimpleNamespace(poll=lambda: -9, stdin=None)

    def start() -> tuple[int, int]:
        started.append(clock.now())
        agent._process, agent._since, agent._restart_at = dead, clock.now(), None  # type: ignore[assignment]
        return 1, 1

    monkeypatch.setattr(agent, "start", start)
    start()
    for _ in range(30):
        clock.advance(DAY_S)
        assert "restarted" in agent.poll()[0]
    assert len(started) == 31
    while "too often" not in (agent.poll() or [""])[0]:
        clock.advance(1.0)
    clock.advance(DAY_S)
    assert agent.poll() == []


def test_one_that_was_silent_waits_as_others_do_and_is_never_left_dead_for_it() -> None:
    """On a machine with more to do than it can, all are silent, for as long as that lasts."""
    history = RestartHistory(ClusterConfig(restart_limit=3))
    delays = [history.died(float(second), None, silent=True) for second in range(50)]
    assert delays[-1] > 0
    assert (history.deaths, history.too_many) == (50, False)
    for second in range(4):
        history.died(50.0 + second, None)
    assert history.too_many, "those by itself count"
