"""What tests do to the segments of a running cluster, behind everybody's back."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.served_cluster import Serving, family
from twinpool.cluster.arena import arena_agent

_BLOCK = 4096


def agent_of(cluster: Serving) -> psutil.Process:
    """The process that holds the segments."""
    (found,) = _agents(cluster)
    return found


def _agents(cluster: Serving) -> list[psutil.Process]:
    """One, but for the moment after it died."""
    script = str(arena_agent.__file__)
    found = []
    for process in family(cluster.process):
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.cmdline()[-1:] == [script]:
                found.append(process)
    return found


def segments(cluster: Serving) -> dict[str, Path]:
    """The segments that it holds, by worker and rank, as files; none while there is no agent."""
    found = {}
    for fd in (fd for agent in _agents(cluster) for fd in _descriptors(agent)):
        try:
            link = os.readlink(fd)
        except FileNotFoundError:
            continue  # it opens and closes others meanwhile
        if link.startswith("/memfd:twinpool-arena-"):
            found[link.removeprefix("/memfd:twinpool-arena-").partition(" ")[0]] = fd
    return found


def _descriptors(process: psutil.Process) -> list[Path]:
    with suppress(FileNotFoundError):
        return list(Path(f"/proc/{process.pid}/fd").iterdir())
    return []


def _open(cluster: Serving, worker: str) -> mmap.mmap:
    fd = os.open(segments(cluster)[f"{worker}.0"], os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def damage_last_page(cluster: Serving, worker: str) -> None:
    """Flip a byte of the last page that is in use."""
    with _open(cluster, worker) as memory:
        block = len(memory) // _BLOCK - 1
        while not any(memory[block * _BLOCK : (block + 1) * _BLOCK]):
            block -= 1
        at = max(i for i in range(block * _BLOCK, (block + 1) * _BLOCK) if memory[i])
        memory[at] ^= 0xFF


def tear_record(cluster: Serving, worker: str, number: int) -> None:
    """Change a byte of the `number`-th record that is in use, as if its writer had died over it."""
    with _open(cluster, worker) as memory:
        step = 64 + 96 + 4 * 16
        used = [at for at in range(_BLOCK, _BLOCK + 4096 * step, step) if any(memory[at : at + 8])]
        memory[used[number] + 40] ^= 0xFF
