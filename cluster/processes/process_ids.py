"""Identifying processes by pid and start time, because the kernel gives a pid to another process after a while."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start_time(pid: int) -> int | None:
    """A number that differs between processes that had the same pid (clock ticks since boot on Linux); None when
    there is no such process, or only its zombie."""
    if sys.platform.startswith("linux"):
        try:
            # The command name is in parentheses and may hold anything, spaces and parentheses included.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in ("Z", "X") else int(fields[19])
    import psutil

    try:
        return int(psutil.Process(pid).create_time() * 100)
    except psutil.NoSuchProcess:
        return None


def same_process(pid: int, started: int) -> bool:
    """Whether the process that had `pid` and start time `started` still runs."""
    return start_time(pid) == started


def kill_process(pid: int, started: int | None = None) -> None:
    """SIGKILL a process; nothing happens when it is gone, or when its pid belongs to another process by now."""
    _signal_process(pid, started, signal.SIGKILL)


def terminate_process(pid: int, started: int) -> None:
    """SIGTERM a process; otherwise as `kill_process`."""
    _signal_process(pid, started, signal.SIGTERM)


def _signal_process(pid: int, started: int | None, number: signal.Signals) -> None:
    if pid > 1 and (started is None or same_process(pid, started)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, as with its parent process (Linux;
    elsewhere nothing happens). Exits at once when the parent is gone already."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """``process_ids.py COMMAND...``: run the command in this process, tied to the life of the parent. It is a script
    because almost nothing is safe between a fork and an exec; so the child ties itself here, after an exec."""
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()


TIED = (sys.executable, "-S", "-P", "-E", str(__file__))
"""Prefix of a command line whose process is to die with this one."""
