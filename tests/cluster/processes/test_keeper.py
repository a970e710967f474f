"""The keeper of a detached cluster, over supervisors that are small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twinpool.cluster.processes import keeper
from twinpool.cluster.processes.keeper import NextSupervisor
from twinpool.cluster.processes.process_ids import same_process, start_time

WAIT_S = 60.0
SUPERVISOR = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]
def end(*_):
    sys.exit(int(open(folder + "/exit").read()) if os.path.exists(folder + "/exit") else 0)
signal.signal(signal.SIGTERM, end)
service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(folder + "/starts", "a") as starts:
    starts.write(f"{os.getpid()} {service.pid}\\n")
if os.path.exists(folder + "/fail"):
    sys.exit(1)
while True:
    time.sleep(0.05)
"""


class Kept:
    """A keeper's process and what its supervisors have written."""

    def __init__(self, folder: Path, supervisor: str = SUPERVISOR) -> None:
        self.folder = folder / "twinpool-kept"
        self.folder.mkdir()
        mark = "test-keeper-" + folder.name
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-P", "-E", str(keeper.__file__), str(self.folder), mark),
                *(sys.executable, "-c", supervisor, str(self.folder)),
            ],
            env=os.environ | {"TWINPOOL_RUN": mark},
        )

    def starts(self) -> list[tuple[int, int]]:
        """Pid of each supervisor so far, and of the service it has started."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(b)) for a, b in (line.split() for line in lines)]

    def after(self, starts: int) -> tuple[int, int]:
        until(lambda: len(self.starts()) >= starts)
        return self.starts()[starts - 1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for pids in self.starts():
            for pid in pids:
                if start_time(pid) is not None:
                    os.kill(pid, signal.SIGKILL)


def until(true: Callable[[], object]) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not true():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def test_a_supervisor_that_is_killed_is_started_again_and_services_live_on(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    try:
        first, service = kept.after(1)
        began = start_time(service)
        assert began is not None
        (kept.folder / "ready").touch()
        for number in (2, 3):
            os.kill(kept.starts()[-1][0], signal.SIGKILL)
            assert kept.after(number)[0] != first
            assert same_process(service, began)
        kept.process.send_signal(signal.SIGTERM)
        assert kept.process.wait(WAIT_S) == 0
        assert not same_process(service, began), "with the keeper all of it ends"
        assert not kept.folder.exists()
        assert all(start_time(pid) is None for pids in kept.starts() for pid in pids)
    finally:
        kept.close()


def test_a_service_without_a_supervisor_leaves_no_zombie(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    try:
        first, service = kept.after(1)
        (kept.folder / "ready").touch()
        os.kill(first, signal.SIGKILL)
        kept.after(2)
        os.kill(service, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{service}").exists())
    finally:
        kept.close()


def test_a_supervisor_that_ends_before_the_cluster_served_ends_it(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    try:
        _, service = kept.after(1)
        os.kill(kept.starts()[0][0], signal.SIGKILL)
        assert kept.process.wait(WAIT_S) == 0
        assert len(kept.starts()) <= 1
        assert start_time(service) is None
    finally:
        kept.close()


def test_a_supervisor_that_ends_in_order_ends_the_cluster(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    try:
        supervisor, service = kept.after(1)
        (kept.folder / "ready").touch()
        os.kill(supervisor, signal.SIGTERM)
        assert kept.process.wait(WAIT_S) == 0
        assert start_time(service) is None
    finally:
        kept.close()


def test_a_supervisor_has_the_time_that_its_file_says_and_is_told_each_time(tmp_path: Path) -> None:
    """It notes what it is told, and ends when it is told twice; it would be killed by then if it had less time."""
    script = (
        "import os, signal, sys\ntold = []\n"
        "def tell(*_):\n"
        "    told.append(1)\n"
        "    open(sys.argv[1] + '/told', 'a').write('x')\n"
        "    if len(told) == 2: sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, tell)\n"
        "open(sys.argv[1] + '/starts', 'w').write(f'{os.getpid()} {os.getpid()}\\n')\n"
        "while True: signal.pause()\n"
    )
    kept = Kept(tmp_path, script)
    try:
        kept.after(1)
        (kept.folder / keeper.END_SECONDS).write_text("600")
        assert keeper.end_seconds(kept.folder) == 600.0
        for number in (1, 2):
            kept.process.send_signal(signal.SIGTERM)
            if number == 1:
                until((kept.folder / "told").exists)
        assert kept.process.wait(WAIT_S) == 0
    finally:
        kept.close()


@pytest.mark.parametrize(("text", "seconds"), [(None, keeper.END_S), ("31", 31.0), ("", keeper.END_S)])
def test_a_keeper_knows_how_long_an_end_takes(tmp_path: Path, text: str | None, seconds: float) -> None:
    if text is not None:
        (tmp_path / keeper.END_SECONDS).write_text(text)
    assert keeper.end_seconds(tmp_path) == seconds


def test_what_the_supervisor_says_it_owns_goes_too(tmp_path: Path) -> None:
    """A process without the run's mark, and a file elsewhere."""
    plain = {k: v for k, v in os.environ.items() if k != "TWINPOOL_RUN"}
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=plain)
    run_file = tmp_path / "run.json"
    run_file.touch()
    kept = Kept(tmp_path)
    try:
        kept.after(1)
        (kept.folder / "owned").write_text(f"pid {other.pid} {start_time(other.pid)}\npath {run_file}\n")
        kept.process.send_signal(signal.SIGTERM)
        assert kept.process.wait(WAIT_S) == 0
        assert other.wait(WAIT_S) == -signal.SIGKILL
        assert not run_file.exists()
    finally:
        other.kill()
        kept.close()


def replacement(folder: Path, *, takes_over: bool) -> NextSupervisor:
    """A supervisor of another build, which notes a variable of its environment and ends unless it takes over."""
    taken = f'open({str(folder / keeper.TAKEN_OVER)!r}, "w").write(str(os.getpid()))\n'
    noted = f'open({str(folder / "build")!r}, "w").write(os.environ["BUILD"])\n'
    script = SUPERVISOR.replace("while True:", (taken if takes_over else "sys.exit(3)\n") + noted + "while True:")
    return NextSupervisor([sys.executable, "-c", script, str(folder)], {"BUILD": "next", "TWINPOOL_TEST_OLD": None})


def test_a_supervisor_is_replaced_and_the_new_one_is_kept_from_then_on(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    try:
        first, service = kept.after(1)
        began = start_time(service)
        (kept.folder / "ready").touch()
        replacement(kept.folder, takes_over=True).write(kept.folder)
        second, _ = kept.after(2)
        until((kept.folder / "build").exists)
        assert (kept.folder / keeper.TAKEN_OVER).read_text() == str(second)
        assert start_time(first) is None
        assert began is not None
        assert same_process(service, began), "what the one before has started lives on"
        (kept.folder / "build").unlink()
        for number in (3, 4):
            # Its own later deaths don't bring the one before back.
            os.kill(kept.starts()[-1][0], signal.SIGKILL)
            kept.after(number)
            until(lambda: (kept.folder / "build").exists() and bool((kept.folder / "build").read_text()))
            assert (kept.folder / "build").read_text() == "next"
            (kept.folder / "build").unlink()
        assert not (kept.folder / keeper.FAILED).exists()
        kept.process.send_signal(signal.SIGTERM)
        assert kept.process.wait(WAIT_S) == 0
    finally:
        kept.close()


@pytest.mark.parametrize("why", ["it ends", "it can't be started"])
def test_a_replacement_that_does_not_take_over_is_given_up(tmp_path: Path, why: str) -> None:
    kept = Kept(tmp_path)
    try:
        kept.after(1)
        (kept.folder / "ready").touch()
        if why == "it ends":
            replacement(kept.folder, takes_over=False).write(kept.folder)
            kept.after(3)  # The replacement, and the one of before again.
            assert (kept.folder / keeper.FAILED).read_text() == "exit code 3"
        else:
            NextSupervisor([str(tmp_path / "no-python")], {}).write(kept.folder)
            kept.after(2)
            assert "no-python" in (kept.folder / keeper.FAILED).read_text()
        (kept.folder / "build").unlink(missing_ok=True)
        os.kill(kept.starts()[-1][0], signal.SIGKILL)
        kept.after(len(kept.starts()) + 1)
        assert not (kept.folder / "build").exists(), "the one of before goes on being it"
        assert kept.process.poll() is None
    finally:
        kept.close()


def look(kept: keeper.Keeper) -> None:
    """As a round of process 7 does."""
    kept._look_for_takeover(7)


def supervisor_of(kept: keeper.Keeper) -> NextSupervisor:
    """What the keeper starts next."""
    return kept._supervisor


def test_only_the_supervisor_on_trial_itself_takes_the_cluster_over(tmp_path: Path) -> None:
    """What another process has said, the supervisor of an earlier upgrade say, is nothing of this one."""
    before, trial = ["before"], NextSupervisor(["next"], {})
    kept = keeper.Keeper(tmp_path, "mark", before)
    look(kept)
    (tmp_path / keeper.TAKEN_OVER).write_text("7")
    look(kept)
    assert supervisor_of(kept).command == before, "nobody is on trial"
    kept._trial = trial
    for said in ("", "70", " 7", "-7"):
        (tmp_path / keeper.TAKEN_OVER).write_text(said)
        look(kept)
        assert (supervisor_of(kept).command, kept._trial) == (before, trial), said
    (tmp_path / keeper.TAKEN_OVER).write_text("7")
    look(kept)
    assert [supervisor_of(kept), kept._trial] == [trial, None]
    kept._trial = NextSupervisor(["third"], {})
    kept._failed("it fell")
    assert [supervisor_of(kept), kept._trial] == [trial, None], "back to the one that had taken over"
    assert (tmp_path / keeper.FAILED).read_text() == "it fell"
