"""When what has died is started again: workers, the router, the arena agent."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinpool.cluster.arena.local_agent import LocalArenaAgent
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.serve.kept_service import KeptService, PartFailed
from twinpool.cluster.serve.router_services import RouterReplica, RouterServices
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


class Router:
    """A router's process that dies so long after each of its starts."""

    name = "router"

    def __init__(self, clock: ManualClock, lives_s: Callable[[int], float], most: int, look_s: float = 0.1) -> None:
        self.clock, self.lives_s, self.most, self.look_s = clock, lives_s, most, look_s
        self.started: list[float] = [clock.now()]
        self.dead = False
        self.kills = 0

    def ended(self) -> str | None:
        self.clock.advance(self.look_s)
        if not self.dead and self.clock.now() - self.started[-1] >= self.lives_s(len(self.started)):
            self.dead = True
        return "signal 9" if self.dead else None

    def kill(self) -> None:
        self.dead, self.kills = True, self.kills + 1

    def start(self) -> tuple[int, int]:
        assert self.dead, "one at a time"
        self.dead = False
        self.started.append(self.clock.now())
        return self.process

    @property
    def process(self) -> tuple[int, int]:
        return len(self.started), 1


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


def keep_alive(router: Router, clock: ManualClock, hangs: bool = False) -> list[str]:
    """What is done about the router until it has been started so often, or it is given up."""
    lines: list[str] = []
    kept: Any = KeptService(router, CONFIG, clock, lines.append, lambda *mark: None, lambda name: "")  # type: ignore[arg-type]
    probe: Any = type("P", (Probe,), {"hangs": hangs})()
    routers: Any = RouterServices.__new__(RouterServices)
    routers.__dict__ |= {
        "_prepared": types.SimpleNamespace(config=Config(cluster=CONFIG)),
        "_report": lines.append,
        "_leaving": {},
        "_obstacle": "",
        "_build": "a build",
        "_successor": None,
    }
    routers._replicas = [RouterReplica(kept, routers.mark, "a build", probe)]
    while len(router.started) <= router.most:
        clock.advance(0.1)
        routers.tend()
    return lines


def test_a_router_that_dies_once_a_day_does_not_end_the_cluster() -> None:
    clock = ManualClock()
    router = Router(clock, lambda start: 0.0, 100, look_s=DAY_S)
    lines = keep_alive(router, clock)
    assert len(lines) == 100
    assert lines[-1] == "router died (signal 9); restarting"


def test_a_router_that_dies_at_once_again_and_again_ends_the_cluster_and_waits_in_between() -> None:
    clock = ManualClock()
    router = Router(clock, lambda start: 0.0, 1000)
    with pytest.raises(PartFailed, match="too often"):
        keep_alive(router, clock)
    assert len(router.started) == 1 + CONFIG.restart_limit
    gaps = [after - before for before, after in zip(router.started, router.started[1:], strict=False)]
    assert gaps[-1] >= 10.0 > gaps[0]


def test_a_router_that_hangs_is_killed_once_and_not_while_it_is_away() -> None:
    clock = ManualClock()
    router = Router(clock, lambda start: 1e9, 4)
    lines = keep_alive(router, clock, hangs=True)
    assert router.kills == len(router.started) - 1 == sum("hung" in line for line in lines)


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
