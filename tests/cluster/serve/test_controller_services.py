"""Controllers that are replaced: by those of another build, or with other settings; none is ended before the next one
has loaded."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.serve.services import service_context
from tests.cluster.serve.test_detached_state import plan, state
from tests.support.served_cluster import until
from twinpool.cluster.processes.process_ids import same_process
from twinpool.cluster.serve import rolling_services
from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.rolling_services import REPLACE_S, ControllerServices, LocalControllers
from twinpool.cluster.serve.service import PartFailed
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig

CONTROLLER = """
import contextlib, itertools, os, signal, sys, time
from pathlib import Path
def given(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""
def replaced():
    words = sys.argv[sys.argv.index("--replaces") + 1:] if "--replaces" in sys.argv else []
    return [int(word.split(":")[0]) for word in itertools.takewhile(lambda word: not word.startswith("-"), words)]
how = Path(given("--config-json")).read_text()
Path(given("--config-json") + f".{os.getpid()}").touch()
if how == "dies":
    sys.exit(1)
if how != "never ready":
    for pid in replaced() if how != "waits" else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    if how == "dies late":
        sys.exit(1)
    os.write(int(given("--ready-fd")), b"ready")
time.sleep(600)
"""
"""What `serve` sees of a controller, by what the settings' file says."""


@pytest.fixture(scope="module")
def prepared() -> ServePlan:
    return plan()


class Scene:
    """One supervisor after the other, of one detached cluster."""

    def __init__(self, folder: Path, prepared: ServePlan, stack: ExitStack, controllers: int = 2) -> None:
        self.folder, self.config, self.stack = folder, prepared.config, stack
        self.settings = folder / "settings"
        self.settings.touch()
        if not (folder / "cluster.state").exists():
            state(folder, prepared).save()
        self.state = DetachedState.load(folder)
        self.clock, self.said = ManualClock(), list[str]()
        context = service_context(folder, self.clock, self.said.append, stack, self.state)
        local = LocalControllers(ClusterConfig(name="c"), "127.0.0.1", (1, 2)[:controllers], folder / "ledger")
        self.controllers = ControllerServices(context, local, self.config, self.settings)

    def start(self) -> None:
        self.controllers.start(dict(os.environ))
        for service in self.controllers.services():
            assert service.listening(60.0)

    def change(self, most: int) -> None:
        """Go by a configuration with another setting of controllers."""
        prefill = dataclasses.replace(self.config.autoscaling.prefill, max_workers=most)
        autoscaling = dataclasses.replace(self.config.autoscaling, prefill=prefill)
        self.config = dataclasses.replace(self.config, autoscaling=autoscaling)
        self.controllers.change(self.config)

    def tended(self) -> tuple[int, str]:
        self.controllers.tend()
        return self.controllers.stale()

    def has_read(self, pid: int) -> bool:
        """Whether the controller of this process knows what it is to do."""
        return self.settings.with_name(f"{self.settings.name}.{pid}").exists()

    def processes(self) -> list[tuple[int, int]]:
        return [service.process[:2] for service in self.controllers.services()]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def fake_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling_services, "CONTROLLER", (sys.executable, "-c", CONTROLLER))


@pytest.mark.slow
def test_those_with_other_settings_are_replaced_one_after_the_other(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack
) -> None:
    scene = Scene(tmp_path, prepared, stack)
    scene.start()
    before = scene.processes()
    scene.change(17)
    assert scene.tended() == (2, ""), "the first successor is on its way"
    assert scene.processes() == before
    until(lambda: scene.tended() == (0, ""), "both to be replaced")
    assert set(scene.processes()).isdisjoint(before)
    assert not any(same_process(*one) for one in before)
    assert scene.said == ["controller is replaced", "controller-standby-1 is replaced"]
    assert {name: one.pid for name, one in scene.state.services.items()} == dict(
        zip(("controller", "controller-standby-1"), [pid for pid, _ in scene.processes()], strict=True)
    )
    scene.change(17)
    assert scene.controllers.stale() == (0, ""), "nothing has changed"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "never ready"])
def test_one_stays_where_the_next_one_does_not_start(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack, how: str
) -> None:
    scene = Scene(tmp_path, prepared, stack)
    scene.start()
    before = scene.processes()
    scene.settings.write_text(how)
    scene.change(17)
    scene.controllers.tend()
    successor = scene.state.services["controller"]
    if how == "never ready":
        assert scene.tended() == (2, "")
        scene.clock.advance(REPLACE_S + 0.1)
    until(lambda: scene.tended()[1] != "", "the trouble")
    behind, trouble = scene.tended()
    assert behind == 2
    assert trouble.endswith("; the one before goes on")
    assert scene.processes() == before
    assert all(same_process(*one) for one in before)
    assert scene.state.services["controller"].pid == before[0][0]
    assert not scene.state.leaving
    assert not same_process(successor.pid, successor.started), "it is ended"
    scene.settings.write_text("")
    scene.change(18)
    until(lambda: scene.tended() == (0, ""), "the next change to be tried")


@pytest.mark.slow
def test_one_that_has_ended_the_other_and_dies_is_started_again(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack
) -> None:
    scene = Scene(tmp_path, prepared, stack, controllers=1)
    scene.start()
    (before,) = scene.processes()
    scene.settings.write_text("dies late")
    scene.change(17)
    scene.controllers.tend()
    until(lambda: not same_process(*before), "its end")
    scene.settings.write_text("")

    def back() -> bool:
        scene.clock.advance(1.0)
        return scene.tended() == (0, "") and same_process(*scene.processes()[0])

    until(back, "the next one to be started again")
    assert any("died (exit code 1)" in line for line in scene.said)


@pytest.mark.slow
def test_one_that_hangs_after_the_other_has_ended_is_started_again(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack
) -> None:
    scene = Scene(tmp_path, prepared, stack, controllers=1)
    scene.start()
    (before,) = scene.processes()
    scene.settings.write_text("never ready")
    scene.change(17)
    scene.controllers.tend()
    hung = scene.state.services["controller"]
    until(lambda: scene.has_read(hung.pid), "the successor, which hangs")
    os.kill(before[0], signal.SIGKILL)
    until(lambda: not same_process(*before), "its end")
    scene.settings.write_text("")
    scene.clock.advance(REPLACE_S + 0.1)

    def back() -> bool:
        scene.clock.advance(1.0)
        pid = scene.processes()[0][0] if scene.tended() == (0, "") else hung.pid
        return pid != hung.pid and scene.controllers.services()[0].listening(0.0)

    until(back, "another one to be started")
    assert not same_process(hung.pid, hung.started)


@pytest.mark.slow
def test_one_whose_successor_is_on_its_way_may_die(tmp_path: Path, prepared: ServePlan, stack: ExitStack) -> None:
    """Its successor takes the place, and nothing else is started there."""
    scene = Scene(tmp_path, prepared, stack, controllers=1)
    scene.start()
    (before,) = scene.processes()
    os.mkfifo(tmp_path / "slow")
    scene.controllers._settings = tmp_path / "slow"
    scene.change(17)
    assert scene.tended() == (1, "")
    os.kill(before[0], signal.SIGKILL)
    until(lambda: not same_process(*before), "its end")
    assert scene.tended() == (1, "")
    assert scene.processes() == [before]
    with (tmp_path / "slow").open("w") as writing:
        writing.write("waits")
    until(lambda: scene.tended() == (0, ""), "the successor")
    assert scene.said == ["controller is replaced"]


@pytest.mark.slow
def test_the_next_supervisor_replaces_those_of_other_settings_and_takes_others_over(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack
) -> None:
    first = Scene(tmp_path, prepared, stack)
    first.start()
    before = first.processes()
    second = Scene(tmp_path, prepared, stack)
    second.start()
    assert second.processes() == before
    third = Scene(tmp_path, prepared, stack)
    third.change(17)
    third.start()
    assert set(third.processes()).isdisjoint(before)
    assert third.controllers.stale() == (0, "")


@pytest.mark.slow
def test_a_supervisor_that_cannot_replace_one_fails_and_the_next_goes_on_with_it(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack
) -> None:
    """As with an upgrade to a build whose controller doesn't start."""
    first = Scene(tmp_path, prepared, stack)
    first.start()
    before = first.processes()
    second = Scene(tmp_path, prepared, stack)
    second.settings.write_text("dies")
    second.change(17)
    with pytest.raises(PartFailed, match="the one before goes on"):
        second.start()
    third = Scene(tmp_path, prepared, stack)
    third.start()
    assert third.processes() == before


@pytest.mark.slow
@pytest.mark.parametrize("successor", ["is gone", "lives"])
def test_a_supervisor_that_dies_while_it_replaces_one_leaves_no_orphan(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack, successor: str
) -> None:
    first = Scene(tmp_path, prepared, stack, controllers=1)
    first.start()
    (before,) = first.processes()
    first.settings.write_text("never ready")
    first.change(17)
    first.controllers.tend()
    pid = first.state.services["controller"].pid
    until(lambda: first.has_read(pid), "the successor, which hangs")
    if successor == "is gone":
        os.kill(pid, signal.SIGKILL)
        until(lambda: not same_process(*first.state.services["controller"][:2]), "its end")
    first.settings.write_text("")
    second = Scene(tmp_path, prepared, stack, controllers=1)
    second.controllers.start(dict(os.environ))
    if successor == "is gone":
        assert second.processes() == [before]
        assert not second.state.leaving
        return
    assert second.processes()[0][0] != pid, "it was to have other settings"
    until(lambda: not same_process(*before), "the end of the one before both")


@pytest.mark.slow
def test_a_successor_that_dies_after_its_supervisor_is_followed_by_one_that_ends_the_other(
    tmp_path: Path, prepared: ServePlan, stack: ExitStack
) -> None:
    first = Scene(tmp_path, prepared, stack, controllers=1)
    first.start()
    (before,) = first.processes()
    first.settings.write_text("never ready")
    first.change(17)
    first.controllers.tend()
    until(lambda: first.has_read(first.state.services["controller"].pid), "the successor, which hangs")
    second = Scene(tmp_path, prepared, stack, controllers=1)
    second.change(17)
    second.controllers.start(dict(os.environ))
    (successor,) = second.processes()
    assert successor != before
    assert same_process(*before)
    second.settings.write_text("")
    os.kill(successor[0], signal.SIGKILL)
    until(lambda: not same_process(*successor), "its end")

    def ended() -> bool:
        second.clock.advance(1.0)
        second.controllers.tend()
        return not same_process(*before)

    until(ended, "the end of the one before")
    assert same_process(*second.processes()[0])
