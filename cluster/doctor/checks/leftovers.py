"""What earlier runs left behind: run files of dead clusters, temporary folders, memory in /dev/shm without a user."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, fine, sized, warning
from twinpool.cluster.processes.process_ids import same_process
from twinpool.cluster.processes.reaper import ReapedRun
from twinpool.cluster.processes.run_file import runs_folder
from twinpool.contracts.outside_data import read_json

_RUN = re.compile(r"twinpool-\w{8}")
"""The name of a run's temporary folder."""
MAX_RUNS = 32
"""Folders that are looked at: each costs a look at all processes."""
YOUNG_S = 120.0
"""A run that began so lately may have no processes yet."""
MIN_SEGMENT = 1 << 20
"""Bytes of a file in /dev/shm that are worth a word."""


def check_leftovers(case: DoctorCase) -> Iterator[Finding]:
    """Of this user alone; nothing is removed."""
    found = [*_run_files(), *_folders(case), *_segments(case)]
    yield from found or [fine("nothing is left of earlier runs")]


def _run_files() -> Iterator[Finding]:
    dead = []
    for path in sorted(runs_folder().glob("run-*.json")):
        try:
            tree = read_json(path.read_text())
            if not same_process(int(tree["pid"]), int(tree["started"])):
                dead.append(path)
        except (OSError, ValueError, LookupError, TypeError):
            dead.append(path)
    if dead:
        yield warning(
            f"{len(dead)} run files of clusters that are gone, {dead[0]} among them",
            f"rm {' '.join(map(str, dead[:4]))}{' ...' if len(dead) > 4 else ''}",
            "a cluster that was killed with its reaper leaves them; commands skip them",
        )


def _folders(case: DoctorCase) -> Iterator[Finding]:
    """Temporary folders of runs of which no process is left."""
    now, dead = case.host.now().timestamp(), list[Path]()
    runs = sorted(one for one in case.host.temporary.glob("twinpool-*") if _RUN.fullmatch(one.name))
    for folder in runs[:MAX_RUNS]:
        try:
            there = folder.stat()
        except OSError:
            continue
        ours = folder.is_dir() and not folder.is_symlink() and there.st_uid == os.getuid()
        old = now - there.st_mtime > YOUNG_S
        if ours and old and not ReapedRun(folder.name, str(folder)).members():
            dead.append(folder)
    if dead:
        yield warning(
            f"{len(dead)} temporary folders of runs that are gone, {dead[0]} among them",
            f"rm -r {' '.join(map(str, dead[:4]))}{' ...' if len(dead) > 4 else ''}",
        )


def _segments(case: DoctorCase) -> Iterator[Finding]:
    """Files in /dev/shm that no process has open or mapped: they take memory until somebody removes them."""
    ours = {}
    try:
        entries = list(os.scandir(case.host.shm))
    except OSError:
        return  # Told of with shared memory.
    now = case.host.now().timestamp()
    for entry in entries:
        try:
            there = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        big = entry.is_file(follow_symlinks=False) and there.st_blocks * 512 >= MIN_SEGMENT
        if big and there.st_uid == os.getuid() and now - there.st_mtime > YOUNG_S:
            ours[entry.path] = there.st_blocks * 512
    if not ours:
        return
    used = _in_use(case)
    dead = {path: size for path, size in ours.items() if path not in used}
    if dead:
        yield warning(
            f"{sized(sum(dead.values()))} of memory are held by {len(dead)} files of {case.host.shm} that no process "
            f"has open, {next(iter(dead))} among them",
            f"rm {' '.join(list(dead)[:4])}{' ...' if len(dead) > 4 else ''}",
        )


def _in_use(case: DoctorCase) -> set[str]:
    """Paths in /dev/shm that some process has open or mapped, as far as this user may see."""
    found, shm = set(), f"{case.host.shm}/"
    for process in case.host.proc.glob("[0-9]*"):
        for line in case.host.read(process / "maps").splitlines():
            if shm in line:
                found.add(line[line.index(shm) :].removesuffix(" (deleted)"))
        try:
            for link in os.scandir(process / "fd"):
                target = os.readlink(link.path)
                if target.startswith(shm):
                    found.add(target)
        except OSError:
            continue
    return found
