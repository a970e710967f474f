"""The keeper of a detached cluster: it starts the supervisor again when that dies, and removes all in the end.

``keeper.py FOLDER MARK COMMAND...``: FOLDER is the cluster's own, MARK the run's, COMMAND the supervisor's. It is the
reaper (`cluster.processes.reaper`) of a cluster that outlives the process that launched it, and like the reaper a
script that needs the standard library only: there is little in it that could fail.

It ends, and everything of the cluster with it, when

- the supervisor has ended in order (exit code 0), or by itself before the cluster served (no file ``ready``),
- it is told to (SIGTERM): the supervisor is then told, and has `END_S` seconds,
- the supervisor has died more than `MOST_DEATHS` times within `WINDOW_S`.

The supervisor writes what else belongs to the cluster into FOLDER/owned, in the reaper's lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

if __name__ == "__main__":  # A script, which finds nothing but the standard library.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.processes.reaper import ReapedRun

POLL_S = 0.1
END_S = 15.0
MOST_DEATHS, WINDOW_S = 20, 600.0
BACKOFF_S, BACKOFF_MAX_S = 0.2, 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """The keeper of one cluster."""

    def __init__(self, folder: Path, mark: str, command: list[str]) -> None:
        self._folder, self._mark, self._command = folder, mark, command
        self._told = False
        """Whether the cluster is to end."""
        self._deaths: deque[float] = deque()

    def tell(self, number: int, frame: object) -> None:
        """Have the cluster end: the handler of SIGTERM."""
        self._told = True

    def run(self) -> None:
        """Keep the cluster until it ends, then remove what is left of it."""
        if sys.platform.startswith("linux"):
            # Services whose supervisor has died become this process's children, and leave no zombies.
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        while not self._told:
            code = self._supervise()
            if code == 0 or self._told or not (self._folder / "ready").exists() or self._too_many():
                break
            self._wait(min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (len(self._deaths) - 1)))
        self._end()

    def _supervise(self) -> int:
        """Run one supervisor to its end; returns its exit code."""
        process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = None
        while (code := process.poll()) is None:
            if self._told and deadline is None:
                deadline = time.monotonic() + END_S
                process.send_signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                process.kill()
            self._reap(process.pid)
            time.sleep(POLL_S)
        return code

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
        return len(self._deaths) > MOST_DEATHS

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
