"""The rounds of a keeper, by themselves: over supervisors that are no processes, and a clock that its sleeps move."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinpool.cluster.processes import keeper
from twinpool.cluster.processes.keeper import Keeper, NextSupervisor

KILLED = -signal.SIGKILL


class Process:
    """A supervisor: it ends when it is killed, or with `code` at the time `ends`."""

    def __init__(self, pid: int, now: Callable[[], float], ends: float, code: int) -> None:
        self.pid, self._now, self._ends, self._code = pid, now, ends, code
        self.kills: list[float] = []
        self.told: list[float] = []

    def poll(self) -> int | None:
        if self.kills:
            return KILLED
        return self._code if self._now() >= self._ends else None

    def kill(self) -> None:
        self.kills.append(self._now())

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        self.told.append(self._now())


class Rounds:
    """A keeper whose supervisors end as the test says. What is `at` a time happens in the first sleep from then on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self.started = folder, 1000.0, list[tuple[str, Process]]()
        self.ends, self.code = float("inf"), 1
        self.refused = set[str]()
        """Commands that can't be started."""
        self.at: list[tuple[float, Callable[[], object]]] = []
        self.keeper = Keeper(folder, "mark", ["before"])
        monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(NextSupervisor, "start", lambda supervisor: self._start(supervisor.command[0]))
        monkeypatch.setattr(Keeper, "_reap", lambda *_: None)

    def _sleep(self, seconds: float) -> None:
        assert self.now < 10_000, "it never ends"
        self.now += seconds
        due = [action for at, action in self.at if at <= self.now - 1000]
        self.at = [entry for entry in self.at if entry[0] > self.now - 1000]
        for action in due:
            action()

    def _start(self, command: str) -> Process:
        if command in self.refused:
            raise FileNotFoundError(command)
        process = Process(len(self.started) + 1, lambda: self.now, self.now + self.ends, self.code)
        self.started.append((command, process))
        return process

    def supervise(self) -> int | None:
        """The keeper's round with one supervisor, from its start to its end; returns what the keeper ends with, None
        where another supervisor is to follow."""
        return self.keeper._supervise()

    def tell(self) -> None:
        self.keeper.tell(signal.SIGTERM, None)

    def ask(self, command: str = "next") -> None:
        """Ask for another supervisor."""
        NextSupervisor([command], {}).write(self.folder)

    def take_over(self) -> None:
        (self.folder / keeper.TAKEN_OVER).write_text(str(self.started[-1][1].pid))

    @property
    def failed(self) -> str:
        path = self.folder / keeper.FAILED
        return path.read_text() if path.exists() else ""


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(tmp_path, monkeypatch)


def test_who_is_told_to_end_is_told_as_often_as_the_keeper_and_killed_by_the_time_of_the_first(rounds: Rounds) -> None:
    (rounds.folder / keeper.END_SECONDS).write_text("50")
    rounds.at = [(10.0, rounds.tell), (40.0, rounds.tell)]
    assert rounds.supervise() == KILLED
    ((_, process),) = rounds.started
    assert process.told == [pytest.approx(1010.0, abs=0.21), pytest.approx(1040.0, abs=0.21)]
    assert process.kills == [pytest.approx(1060.1, abs=0.21)]


def test_a_supervisor_that_is_replaced_is_no_death_however_it_ends(rounds: Rounds) -> None:
    rounds.at = [(10.0, rounds.ask)]
    assert rounds.supervise() is None, "another one is to follow at once"
    rounds.at = [(15.0, rounds.take_over)]
    rounds.ends, rounds.code = 8.0, 7
    assert rounds.supervise() == 7
    assert [command for command, _ in rounds.started] == ["before", "next"]
    assert rounds.failed == ""
    assert rounds.supervise() == 7
    assert rounds.started[-1][0] == "next", "it had taken over"


def test_a_supervisor_that_has_taken_over_and_died_at_once_has_died_and_is_kept(rounds: Rounds) -> None:
    """Its word is found with its end, or after it."""
    rounds.ask()
    rounds.ends, rounds.code = 0.05, KILLED
    rounds.at = [(0.0, rounds.take_over)]
    assert rounds.supervise() == KILLED
    assert (rounds.keeper._supervisor.command, rounds.failed) == (["next"], "")


def test_one_that_does_not_take_over_in_its_time_is_killed_and_the_one_before_has_all_time(rounds: Rounds) -> None:
    rounds.ask()
    assert rounds.supervise() is None
    (_, process) = rounds.started[0]
    assert process.kills == [pytest.approx(1000 + keeper.TRIAL_S, abs=0.21)]
    assert rounds.failed == "it had not taken the cluster over in time"
    rounds.ends, rounds.code = keeper.TRIAL_S + 20, 5
    assert rounds.supervise() == 5
    (command, process) = rounds.started[1]
    assert (command, process.kills) == ("before", [])


@pytest.mark.parametrize(("code", "told"), [(0, False), (KILLED, True)])
def test_one_on_trial_whose_cluster_ends_has_not_failed(rounds: Rounds, code: int, told: bool) -> None:
    """In order, by itself or because the keeper was told."""
    rounds.ask()
    rounds.ends, rounds.code = 20.0, code
    rounds.at = [(10.0, rounds.tell)] if told else []
    assert rounds.supervise() == code
    assert rounds.failed == ""


def test_a_cluster_that_ends_has_no_supervisor_replaced(rounds: Rounds) -> None:
    rounds.at = [(10.0, rounds.tell), (11.0, rounds.ask)]
    rounds.ends, rounds.code = 30.0, 0
    assert rounds.supervise() == 0
    ((_, process),) = rounds.started
    assert process.kills == []


def test_what_can_not_be_started_is_given_up_or_ends_the_cluster(rounds: Rounds) -> None:
    rounds.ask("gone")
    rounds.refused = {"gone", "before"}
    assert rounds.supervise() is None
    assert "gone" in rounds.failed
    assert rounds.supervise() == keeper.NOT_STARTED


def test_deaths_are_borne_with_longer_pauses_until_too_many_come_in_their_time(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rounds.folder / "ready").touch()
    ended: list[float] = []
    monkeypatch.setattr(Keeper, "_end", lambda _: ended.append(rounds.now))
    rounds.ends, rounds.code = 40.0, 1
    times = keeper.WINDOW_S / 40.0
    assert times < keeper.MAX_DEATHS, "as many as come in a window"
    rounds.at = [(2 * keeper.WINDOW_S, lambda: setattr(rounds, "ends", 0.0))]
    rounds.keeper.run()
    (end,) = ended
    starts = [process._ends for _, process in rounds.started]
    pauses = [round(later - 40.0 - earlier, 1) for earlier, later in pairwise(starts[:9])]
    assert pauses == [pytest.approx(want, abs=0.21) for want in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0)]
    quick = [process for _, process in rounds.started if process._ends >= 1000 + 2 * keeper.WINDOW_S]
    assert end - 1000 < 2 * keeper.WINDOW_S + keeper.WINDOW_S, "it ended when they came one after the other"
    assert keeper.MAX_DEATHS - times <= len(quick) <= keeper.MAX_DEATHS + 1


def test_the_next_supervisor_is_asked_for_once_and_knows_nothing_of_an_upgrade_before(tmp_path: Path) -> None:
    for name in (keeper.TAKEN_OVER, keeper.FAILED):
        (tmp_path / name).write_text("of before")
    asked = NextSupervisor(["run", "it"], {"A": "1", "B": None}, "/")
    asked.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [keeper.NEXT]
    taken = NextSupervisor.take(tmp_path)
    assert taken is not None
    assert tuple(taken) == tuple(asked)
    assert NextSupervisor.take(tmp_path) is None
    for bad in ("", "[]", '{"command": 1}', "[1, 2, 3, 4]"):
        (tmp_path / keeper.NEXT).write_text(bad)
        assert NextSupervisor.take(tmp_path) is None
        assert not (tmp_path / keeper.NEXT).exists(), "nor is it asked for again"


def test_a_supervisor_starts_with_its_own_folder_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started.append({"command": command} | options))
    monkeypatch.setenv("GOES", "1")
    monkeypatch.setenv("STAYS", "2")
    NextSupervisor(["run"], {"GOES": None, "COMES": "3"}, "/somewhere").start()
    (options,) = started
    environment = options["env"]
    assert (options["command"], options["cwd"], options["start_new_session"]) == (["run"], "/somewhere", True)
    assert "GOES" not in environment
    assert (environment["STAYS"], environment["COMES"]) == ("2", "3")
