"""Routers that are replaced: by those of another build, or with other settings; watched until they have ended."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.serve.services import service_context
from tests.cluster.serve.test_detached_state import plan, state
from tests.support.served_cluster import until
from twinpool.cluster.processes.process_ids import same_process, start_time
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.rolling_services import REPLACE_S
from twinpool.cluster.serve.router_services import RouterCommand, RouterProbe, RouterServices, RoutersPlan
from twinpool.contracts.clock import ManualClock

STALL_S = 15.0

ROUTER = """
import os, sys, time
from pathlib import Path
def given(name):
    return sys.argv[sys.argv.index(name) + 1]
stuck = Path(given("--config-json")).read_text()
if stuck == "dies":
    sys.exit(1)
if stuck != "never listens":
    os.write(int(given("--ready-fd")), b"ready")
time.sleep(600)
"""
"""What `serve` sees of a router: it listens, or doesn't, by what the settings' file says."""


@pytest.fixture(scope="module")
def prepared() -> ServePlan:
    return plan(f"router.stall_s={STALL_S}", "security.admin_port=9300", routers=2)


@pytest.fixture
def old() -> Iterator[ServiceProcess]:
    """A router that answers nobody."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield ServiceProcess(process.pid, start_time(process.pid) or 0, "another")
        process.kill()


def lives(process: ServiceProcess) -> bool:
    return same_process(process.pid, process.started)


class Scene:
    """One supervisor after the other, of one detached cluster."""

    def __init__(self, folder: Path, prepared: ServePlan, stack: ExitStack) -> None:
        self.folder, self.prepared, self.stack = folder, prepared, stack
        self.settings = folder / "settings"
        self.settings.touch()
        if not (folder / "cluster.state").exists():
            state(folder, prepared).save()
        self.state = DetachedState.load(folder)
        self.clock, self.said = ManualClock(), list[str]()
        context = service_context(folder, self.clock, self.said.append, stack, self.state)
        self.routers = RouterServices(context, RoutersPlan.of(prepared), folder)

    def start(self) -> None:
        command = RouterCommand((sys.executable, "-c", ROUTER), dict(os.environ), ("--config-json", str(self.settings)))
        self.routers.start(command)
        for service in self.routers.services():
            assert service.listening(60.0)

    def change(self, **router: float) -> None:
        """Go by a plan with other settings of routers."""
        config = self.prepared.config
        config = dataclasses.replace(config, router=dataclasses.replace(config.router, **router))  # type: ignore[arg-type]
        self.prepared = dataclasses.replace(self.prepared, config=config)
        self.routers.change(RoutersPlan.of(self.prepared))

    def tended(self) -> tuple[int, str]:
        self.routers.tend()
        return self.routers.stale()

    def pids(self) -> list[int]:
        return [service.process.pid for service in self.routers.services()]


@pytest.fixture
def scene(tmp_path: Path, prepared: ServePlan) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, prepared, stack)


def test_one_that_hangs_is_killed_by_whoever_supervises_then(scene: Scene, old: ServiceProcess) -> None:
    scene.state.leaves("router-0.another", old)
    scene.start()
    scene.routers.probe()
    scene.clock.advance(STALL_S - 1)
    for router in scene.routers.services():
        router.probe.started_again()
    scene.routers.tend()
    assert lives(old)
    scene.clock.advance(1.0)
    scene.routers.tend()
    until(lambda: not lives(old), "its end")
    scene.routers.tend()
    assert scene.said == ["router-0.another, which is replaced, hung: no answer for 15 s (router.stall_s)"]
    assert not scene.routers.leaving


def test_those_that_are_replaced_are_asked_whether_they_live_as_the_others_are(
    scene: Scene, old: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence of one that nobody asks would be taken for a hang, and its answers cut off."""
    asked = list[str]()
    monkeypatch.setattr(RouterProbe, "start", lambda probe: asked.append(probe._path.name))
    scene.state.leaves("router-0.another", old)
    scene.start()
    scene.routers.probe()
    mark = scene.routers.mark
    assert sorted(asked) == sorted(["router-0.another.live", f"router-0.{mark}.live", f"router-1.{mark}.live"])


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [0, 3])
def test_the_silence_of_one_that_was_started_again_is_its_own(scene: Scene, deaths: int) -> None:
    """Of one that is started at once, in place of one that hung, and of one that has to wait after quick deaths."""
    scene.start()
    one, two = scene.routers.services()
    first, probe, other = one, one.probe, two.probe
    for _ in range(deaths):
        first.kill()
        scene.routers.tend()
    assert first.down is (deaths > 0)
    scene.clock.advance(STALL_S)
    other.started_again()
    scene.routers.tend()
    assert not first.down
    assert probe.silent_s == 0.0
    said, pids = list(scene.said), scene.pids()
    scene.clock.advance(STALL_S - 0.1)
    other.started_again()
    scene.routers.tend()
    assert (scene.said, scene.pids()) == (said, pids), "it has its own time to answer"
    assert sum("hung" in line for line in said) == (deaths == 0)


def test_the_end_of_the_cluster_is_theirs(tmp_path: Path, prepared: ServePlan, old: ServiceProcess) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, prepared, stack)
        scene.state.leaves("router-0.another", old)
        scene.start()
        assert lives(old)
    until(lambda: not lives(old), "its end")


def test_what_has_ended_is_forgotten(tmp_path: Path, prepared: ServePlan, old: ServiceProcess) -> None:
    kept = state(tmp_path, prepared)
    kept.leaves("router-0.another", old)
    kept.leaves("router-1.another", old._replace(started=old.started + 1))
    assert kept.leaving == {"router-0.another": old}
    kept.save()
    assert set(DetachedState.load(tmp_path).replaced) == {"router-0.another"}


@pytest.mark.slow
def test_routers_with_other_settings_are_replaced_one_after_the_other(scene: Scene) -> None:
    scene.start()
    before = scene.pids()
    scene.change(worker_wait_s=77.0)
    assert scene.routers.stale() == (2, "")
    scene.routers.tend()  # The first successor is started.
    assert scene.routers.stale() == (2, "")
    until(lambda: scene.tended() == (0, ""), "both to be replaced")
    after = scene.pids()
    assert set(after).isdisjoint(before)
    assert {one.pid for one in scene.state.leaving.values()} == set(before), "they finish their answers"
    assert [scene.state.marks[f"router-{number}"] for number in range(2)] == [scene.routers.mark] * 2
    commands = [service._command for service in scene.routers.services()]
    assert all("--take-over" in arguments for arguments in commands)
    ports = [arguments[arguments.index("--admin-port") + 1] for arguments in commands]
    assert ports == ["9300", "9301"], "operators reach each by itself"
    scene.change(worker_wait_s=77.0)
    assert scene.routers.stale() == (0, ""), "nothing has changed"
    scene.clock.advance(STALL_S)
    for router in scene.routers.services():
        router.probe.started_again()
    scene.routers.tend()
    hung = [line.split(",")[0] for line in scene.said if "hung" in line]
    assert [name.partition(".")[0] for name in hung] == ["router-0", "router-1"], "those before, which say nothing"
    assert scene.pids() == after


@pytest.mark.slow
def test_a_change_that_is_taken_back_meanwhile_is_undone(scene: Scene) -> None:
    scene.start()
    before = scene.pids()
    scene.change(worker_wait_s=77.0)
    scene.routers.tend()  # The first successor is on its way.
    scene.change(worker_wait_s=60.0)
    until(lambda: scene.tended() == (0, "") and scene.pids()[0] != before[0], "the first one to be replaced again")
    assert scene.pids()[1] == before[1], "the second one was never due"


@pytest.mark.slow
@pytest.mark.parametrize("serves", [True, False])
def test_a_router_that_dies_while_its_successor_starts_is_noted_as_the_one_that_leaves(
    scene: Scene, serves: bool
) -> None:
    """Else the next supervisor would adopt it, and nobody would know the successor, or the one that goes on."""
    scene.start()
    (before, _), old = scene.pids(), scene.routers.services()[0]
    scene.settings.write_text("" if serves else "never listens")
    scene.change(worker_wait_s=77.0)
    key, mark = f"router-0.{old.mark}", scene.routers.mark
    scene.routers.tend()  # The successor is started.
    successor = scene.state.services["router-0"]
    old.kill()
    scene.routers._services[0].tend()
    assert old.process.pid != before, "it was started again"
    kept = DetachedState.load(scene.folder)
    assert (kept.services["router-0"], kept.marks["router-0"]) == (successor, mark)
    assert kept.replaced[key] == old.process
    if not serves:
        scene.clock.advance(REPLACE_S + 0.1)
        for router in scene.routers.services():
            router.probe.started_again()
    until(lambda: scene.tended()[1] != "" or scene.pids()[0] == successor.pid, "the end of the replacing")
    kept = DetachedState.load(scene.folder)
    if serves:
        assert (kept.services["router-0"], kept.leaving[key]) == (successor, old.process)
    else:
        assert (kept.services["router-0"], kept.marks["router-0"]) == (old.process, old.mark)
        assert key not in kept.replaced


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "never listens"])
def test_a_router_stays_where_its_successor_does_not_serve(scene: Scene, how: str) -> None:
    scene.start()
    before = scene.pids()
    scene.settings.write_text(how)
    scene.change(worker_wait_s=77.0)
    scene.routers.tend()
    if how == "never listens":
        scene.routers.tend()
        assert scene.routers.stale() == (2, "")
        scene.clock.advance(REPLACE_S + 0.1)
        for probe in [router.probe for router in scene.routers.services()]:
            probe.started_again()
    until(lambda: scene.tended()[1] != "", "the trouble")
    behind, trouble = scene.routers.stale()
    assert behind == 2
    assert trouble.endswith("; the one before goes on")
    assert scene.pids() == before
    assert scene.state.services["router-0"].pid == before[0]
    assert not scene.state.leaving


@pytest.mark.slow
def test_a_successor_that_is_on_its_way_does_not_come_after_the_end_has_begun(scene: Scene) -> None:
    scene.start()
    scene.settings.write_text("never listens")
    scene.change(worker_wait_s=77.0)
    scene.routers.tend()
    successor = scene.state.services["router-0"]
    assert lives(successor)
    scene.routers.drain()
    assert not lives(successor)
    until(scene.routers.drained, "the end of the others")


@pytest.mark.slow
def test_the_next_supervisor_goes_on_replacing(
    tmp_path: Path, prepared: ServePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        first = Scene(tmp_path, prepared, stack)
        first.start()
        before = first.pids()
        second = Scene(tmp_path, prepared, stack)
        second.start()
        assert second.pids() == before, "they are taken over"
        config = dataclasses.replace(prepared.config.router, worker_wait_s=77.0)
        changed = dataclasses.replace(prepared, config=dataclasses.replace(prepared.config, router=config))
        monkeypatch.setattr(RouterProbe, "lives", lambda self, within_s: True)
        third = Scene(tmp_path, changed, stack)
        third.start()
        assert set(third.pids()).isdisjoint(before)
        assert third.routers.stale() == (0, "")
        assert {one.pid for one in third.state.leaving.values()} == set(before)
