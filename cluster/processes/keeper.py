"""The keeper of a detached cluster: it starts the supervisor again when that dies, and removes all in the end.

``keeper.py FOLDER MARK COMMAND...``: FOLDER is the cluster's own, MARK the run's, COMMAND the supervisor's. It is the
reaper (`cluster.processes.reaper`) of a cluster that outlives the process that launched it, and like the reaper a
script that needs the standard library only: there is little in it that could fail.

It ends, and everything of the cluster with it, when

- the supervisor has ended in order (exit code 0), or by itself before the cluster served (no file ``ready``),
- it is told to (SIGTERM): the supervisor is then told, each time, and has the seconds of the file `END_SECONDS`,
- the supervisor has died more than `MAX_DEATHS` times within `WINDOW_S`.

The supervisor writes what else belongs to the cluster into FOLDER/owned, in the reaper's lines.

An upgrade replaces the supervisor: who wants that writes its command into FOLDER/next-supervisor (`NextSupervisor`),
and the keeper kills the one that runs and starts that. Where it ends before it has taken the cluster over, by its pid
in FOLDER/taken-over, the command of before goes on being the supervisor's, and FOLDER/upgrade-failed says how it ended.
The keeper itself stays what it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # A script, which finds nothing but the standard library.
    sys.path.insert(0, str(Path(__file__).absolute().parents[3]))

from twinpool.cluster.processes.reaper import ReapedRun
from twinpool.contracts.outside_data import read_json

POLL_S = 0.1
END_SECONDS = "end-seconds"
"""The file of FOLDER that says how long a supervisor may take to end, answers that run included; `END_S` without it."""
END_S = 60.0
TRIAL_S = 300.0
"""How long the supervisor of an upgrade may take to take the cluster over."""
NOT_STARTED = 127
MAX_DEATHS, WINDOW_S = 20, 600.0
BACKOFF_S, BACKOFF_MAX_S = 0.2, 10.0
_PR_SET_CHILD_SUBREAPER = 36


NEXT, TAKEN_OVER, FAILED = "next-supervisor", "taken-over", "upgrade-failed"


class NextSupervisor(NamedTuple):
    """The command of a supervisor, and what its environment has beside the keeper's; None leaves a variable out."""

    command: list[str]
    environment: dict[str, str | None]
    cwd: str | None = None
    """The folder that it starts in; None: the keeper's, which may be a source tree that Python would import from."""

    def write(self, folder: Path) -> None:
        """Have the keeper of the cluster of `folder` replace its supervisor by this one."""
        for name in (TAKEN_OVER, FAILED):
            (folder / name).unlink(missing_ok=True)
        fresh = folder / f"{NEXT}.new"
        fresh.write_text(json.dumps(self))
        fresh.replace(folder / NEXT)

    @classmethod
    def take(cls, folder: Path) -> NextSupervisor | None:
        """The next supervisor of the cluster of `folder`, which is asked for once; None where none is asked for."""
        path = folder / NEXT
        if not path.exists():
            return None
        text = path.read_text()
        path.unlink()
        with contextlib.suppress(ValueError, TypeError):
            return cls(*read_json(text))
        return None

    def start(self) -> subprocess.Popen[bytes]:
        wanted = {**os.environ, **self.environment}
        environment = {name: value for name, value in wanted.items() if value is not None}
        return subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment, cwd=self.cwd
        )


def end_seconds(folder: Path) -> float:
    """How long the supervisor of the cluster of `folder` may take to end."""
    with contextlib.suppress(OSError, ValueError):
        return float((folder / END_SECONDS).read_text())
    return END_S


class Keeper:
    """The keeper of one cluster."""

    def __init__(self, folder: Path, mark: str, command: list[str]) -> None:
        self._folder, self._mark = folder, mark
        self._supervisor = NextSupervisor(command, {})
        self._trial: NextSupervisor | None = None
        """The supervisor of an upgrade, until it has taken the cluster over."""
        self._told = 0
        """How often the cluster was told to end."""
        self._deaths: deque[float] = deque()

    def tell(self, number: int, frame: object) -> None:
        """Have the cluster end: the handler of SIGTERM."""
        self._told += 1

    def run(self) -> None:
        """Keep the cluster until it ends, then remove what is left of it."""
        if sys.platform.startswith("linux"):
            # Services whose supervisor has died become this process's children, and leave no zombies.
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        while not self._told:
            code = self._supervise()
            if code is None:
                continue
            if code == 0 or self._told or not (self._folder / "ready").exists() or self._too_many():
                break
            self._wait(min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (len(self._deaths) - 1)))
        self._end()

    def _supervise(self) -> int | None:
        """Run one supervisor to its end; returns its exit code, None where another one is to follow at once."""
        self._trial = NextSupervisor.take(self._folder) or self._trial
        try:
            process = (self._trial or self._supervisor).start()
        except OSError as error:
            if self._trial is None:
                return NOT_STARTED
            self._failed(str(error))
            return None
        replaced, begun = False, time.monotonic()
        deadline, passed_on = None, 0
        while (code := process.poll()) is None:
            self._look_for_takeover(process.pid)
            late = self._trial is not None and time.monotonic() > begun + TRIAL_S
            if not self._told and not replaced and (late or (self._folder / NEXT).exists()):
                process.kill()
                replaced = True
            if self._told > passed_on:
                deadline = deadline or time.monotonic() + end_seconds(self._folder)
                passed_on = self._told
                process.send_signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                process.kill()
            self._reap(process.pid)
            time.sleep(POLL_S)
        self._look_for_takeover(process.pid)
        if self._trial is not None and code != 0 and not self._told:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._failed(how if not replaced else "it had not taken the cluster over in time")
            return None
        return None if replaced else code

    def _failed(self, how: str) -> None:
        """Go back to the supervisor of before an upgrade."""
        self._trial = None
        (self._folder / FAILED).write_text(how)

    def _look_for_takeover(self, pid: int) -> None:
        """Keep the supervisor of an upgrade from now on, if it has taken the cluster over; `pid` is its process's."""
        with contextlib.suppress(OSError):
            if self._trial is not None and (self._folder / TAKEN_OVER).read_text() == str(pid):
                self._supervisor, self._trial = self._trial, None

    def _reap(self, supervisor: int) -> None:
        """Take the exit codes of services that have no other parent any more. The supervisor's is left: it hides those
        of others until it is taken."""
        if not sys.platform.startswith("linux"):
            return
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == supervisor:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

    def _too_many(self) -> bool:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths) > MAX_DEATHS

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._told and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _end(self) -> None:
        run = ReapedRun(self._mark, str(self._folder))
        with contextlib.suppress(OSError):
            for line in (self._folder / "owned").read_text().splitlines():
                run.on_line(line)
        run.end()


def main() -> None:
    keeper = Keeper(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, keeper.tell)
    keeper.run()


if __name__ == "__main__":
    main()
