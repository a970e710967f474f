"""The reaper: a process that removes everything of a run of `twinpool serve`, however `serve` ends.

The reaper holds one end of a pipe to `serve` and does nothing until the other end closes, be it by a normal exit or by
`kill -9`. Then it kills all processes that are left of the run and removes its files. It imports the standard library
only, is started as a script, and doesn't rely on `serve` having reported every process. A process belongs to the run
when

- `serve` reported it (pid and start time, so that a reused pid is spared), or
- the run's mark is in its environment (all children inherit it), or
- its command line or its output lies in the run's temporary folder (Ray's workers overwrite their environment), or
- its parent belongs to the run.

A run may begin others (one for each of several models): the mark of such a run is that of this one with a dot and more,
and its folder lies beside this one's. They have reapers of their own, and end with this one.

Lines on the pipe: ``pid PID START``, ``path FILE_OR_FOLDER``, ``shm PREFIX`` (names in /dev/shm).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator

DEADLINE_S = 5.0
MARK = "TWINPOOL_RUN"


class ReapedRun:
    """The processes, paths and shared memory of one run, as the reaper knows them."""

    def __init__(self, mark: str, folder: str) -> None:
        self.mark = f"{MARK}={mark}".encode()
        self.folder = folder.rstrip("/")
        self.pids: dict[int, int] = {}
        self.paths: list[str] = [folder]
        self.shm: list[str] = []

    def on_line(self, line: str) -> None:
        kind, _, rest = line.strip().partition(" ")
        if kind == "pid":
            pid, _, started = rest.partition(" ")
            self.pids[int(pid)] = int(started)
        elif kind == "path":
            self.paths.append(rest)
        elif kind == "shm":
            self.shm.append(rest)

    def members(self) -> list[int]:
        """Pids of this run's processes that are alive, this one excepted."""
        parents: dict[int, int] = {}
        members: set[int] = set()
        for pid, parent, started in _processes():
            parents[pid] = parent
            if self.pids.get(pid) == started or self._marked(pid):
                members.add(pid)
        while grown := {pid for pid, parent in parents.items() if parent in members} - members:
            members |= grown
        return sorted(members - {os.getpid()})

    def _marked(self, pid: int) -> bool:
        for entry in _read(f"/proc/{pid}/environ").split(b"\0"):
            if entry == self.mark or entry.startswith(self.mark + b"."):
                return True
        command = _read(f"/proc/{pid}/cmdline")
        if any(f"{self.folder}{end}".encode() in command for end in "/."):
            return True
        outputs = [_link(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)]
        return any(output.startswith((f"{self.folder}/", f"{self.folder}.")) for output in outputs)

    def end(self) -> None:
        """Kill the run's processes until none is left, or `DEADLINE_S` has passed, then remove its files. Processes may
        still be starting others, so none must be found twice in a row."""
        deadline = time.monotonic() + DEADLINE_S
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            members = self.members()
            quiet = 0 if members else quiet + 1
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for path in [*self.paths, *_begun(self.folder)]:
            with contextlib.suppress(OSError):
                os.unlink(path) if not os.path.isdir(path) else shutil.rmtree(path, ignore_errors=True)
        for prefix in self.shm:
            for name in _names("/dev/shm"):
                if name.startswith(prefix):
                    with contextlib.suppress(OSError):
                        os.unlink(f"/dev/shm/{name}")


def _processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, start time) of every process that is not a zombie."""
    for name in _names("/proc"):
        if name.isdigit():
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 19 and fields[0] not in (b"Z", b"X"):
                yield int(name), int(fields[1]), int(fields[19])


def _begun(folder: str) -> list[str]:
    """The folders of runs that a run has begun, by the folder of that one."""
    place, name = os.path.split(folder)
    return [os.path.join(place, one) for one in _names(place) if name and one.startswith(f"{name}.")]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def main() -> None:
    fd, mark, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = ReapedRun(mark, folder)
    with os.fdopen(fd) as pipe:
        for line in pipe:
            run.on_line(line)
    run.end()


if __name__ == "__main__":
    main()
