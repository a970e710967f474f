"""Processes of peers: their identities, and proof of their death."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from twinpool.contracts.errors import WireError

MAX_PID = 2**22
"""The largest pid of Linux."""


@cache
def namespace() -> str:
    """Return the name of the running kernel and pid namespace. Pids can be compared only where these are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def readable(fd: int) -> bool:
    """Return whether `fd` is readable now. By poll: select fails for descriptors from 1024 on."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def mine() -> tuple[int, int, str]:
    """Return the identity of this process, as peers are told it: pid, start ticks, namespace."""
    pid = os.getpid()
    return pid, start_ticks(pid) or 0, namespace()


@dataclass
class PidfdWatch:
    """A pidfd of one process of this namespace: the one proof of death that a reused pid can't fake."""

    pid: int
    fd: int

    @classmethod
    def open(cls, pid: int, started: int, boot: str) -> PidfdWatch | None:
        """Watch process `pid`, which started at tick `started` in namespace `boot`; None where it is another namespace
        than this one. Raises `ProcessLookupError` when the process is dead already, and `WireError` where no process
        can have this pid, or the system gives no descriptor for it."""
        if boot != namespace():
            return None
        if not 0 < pid <= MAX_PID:
            raise WireError(f"no process has the pid {pid}")
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise WireError(f"process {pid} can't be watched: {error}") from None
        # In this order: an open descriptor always stands for the same process, while a pid can be reused.
        if start_ticks(pid) != started:
            os.close(fd)
            raise ProcessLookupError(f"pid {pid} is another process by now")
        return cls(pid, fd)

    @property
    def dead(self) -> bool:
        return readable(self.fd)

    @property
    def death(self) -> str:
        """What has happened when it is dead, in words."""
        return f"(pid {self.pid}) died"

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PidfdGroupWatch:
    """Watches all processes of a worker: the worker is dead when the last of them is, since each may write."""

    def __init__(self, watches: Sequence[PidfdWatch]) -> None:
        self.pid = watches[0].pid
        self._alive = list(watches)

    @classmethod
    def open(cls, processes: Sequence[tuple[int, int, str]]) -> PidfdGroupWatch | None:
        """Watch these processes; None where one can't be watched from here. Raises `ProcessLookupError` when all are
        dead already, and `WireError` as `PidfdWatch.open` does."""
        watches: list[PidfdWatch] = []
        for pid, started, boot in processes:
            try:
                watch = PidfdWatch.open(pid, started, boot)
            except ProcessLookupError:
                continue
            except WireError:
                for opened in watches:
                    opened.close()
                raise
            if watch is None:
                for opened in watches:
                    opened.close()
                return None
            watches.append(watch)
        if not watches:
            raise ProcessLookupError(f"pid {processes[0][0]} and all that belonged to it are dead")
        return cls(watches)

    @property
    def fds(self) -> list[int]:
        """The pidfds of processes not known to be dead: one becomes readable when its process dies."""
        return [watch.fd for watch in self._alive]

    def forget_dead(self, forget: Callable[[int], None]) -> None:
        """Close the pidfds of processes that have died, each after it was passed to `forget`."""
        for watch in [watch for watch in self._alive if watch.dead]:
            self._alive.remove(watch)
            forget(watch.fd)
            watch.close()

    @property
    def dead(self) -> bool:
        return all(watch.dead for watch in self._alive)

    def close(self) -> None:
        for watch in self._alive:
            watch.close()
