"""The books of `tests.support.chaos`: what struck, what came of it, how memory went, and what was left behind.

What may live long is measured by process: keeper, supervisor, controllers, routers, arena agent, Ray's own. What each
holds must stop growing: resident memory, open files, and the host memory that the agent keeps for the workers. Workers
are started again all the time; of them the report has the largest at each moment, which judges nothing by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.changing_cluster import Detached
from twinpool.contracts.damage import where_of

LARGEST = "largest worker"
SAMPLES = 150
"""Of one process; its memory is judged from so many on, minutes after it was started: at first each grows."""
SLACK = 4.0
"""MiB that don't count as growth."""
FILES = 12.0
"""Open files that don't: there are more or less of them with the workers and routers of the moment."""
LEFT_S = 10.0
"""How long what was started may take to be gone after `serve` is."""


@dataclass
class Tally:
    """What has happened, across resumes."""

    seed: int
    plane: str
    seconds: float = 0.0
    lives: int = 0
    """Clusters that were started."""
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, list[list[float]]] = field(default_factory=dict)
    """By what was measured, a list for each process that it was measured of, at intervals: MiB or open files."""

    def save(self, path: Path | None) -> None:
        if path is not None:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(self.__dict__))
            fresh.replace(path)

    @classmethod
    def load(cls, path: Path | None, seed: int, plane: str) -> Tally:
        """What `path` says of an earlier run. Ends the command where that was another run, or one that failed."""
        if path is None or not path.exists():
            return cls(seed, plane)
        found = json.loads(path.read_text())
        if (found["seed"], found["plane"]) != (seed, plane):
            raise SystemExit(
                f"{path} is of a run with seed {found['seed']} on {found['plane']}, not {seed} on {plane}: remove it, "
                "or give those"
            )
        if found["failures"]:
            raise SystemExit(f"{path} is of a run that failed: {found['failures'][0]}\nremove it to start anew")
        found |= {key: Counter(found[key]) for key in ("faults", "outcomes")}
        return cls(**found)

    def grown(self) -> list[str]:
        """What didn't stop growing."""
        judged = {name: lists for name, lists in self.memory.items() if name != LARGEST}
        return [
            name
            for name, lists in judged.items()
            if not all(flat(values, FILES if name.endswith("open files") else SLACK) for values in lists)
        ]


def flat(values: list[float], slack: float = SLACK) -> bool:
    """Whether it stopped growing: its last quarter is no more than a tenth above its second."""
    quarter = len(values) // 4
    if len(values) < SAMPLES:
        return True
    second, last = values[quarter : 2 * quarter], values[-quarter:]
    return sum(last) / quarter <= 1.1 * sum(second) / quarter + slack


def report(tally: Tally) -> str:
    lines = [f"seed {tally.seed}, plane {tally.plane}, {tally.seconds / 60:.1f} minutes, {tally.lives} starts of serve"]
    lines += ["faults:", *(f"  {count:6d} {name}" for name, count in sorted(tally.faults.items()))]
    lines += ["outcomes:", *(f"  {count:6d} {name}" for name, count in sorted(tally.outcomes.items()))]
    lines += ["memory (MiB) and open files, quarter by quarter:"]
    for name, lists in tally.memory.items():
        for values in lists:
            quarter = max(1, len(values) // 4)
            means = [sum(values[n * quarter : (n + 1) * quarter]) / quarter for n in range(4) if values[n * quarter :]]
            lines.append(f"  {name}: {' '.join(f'{mean:.1f}' for mean in means)} ({len(values)} samples)")
    return "\n".join([*lines, *(f"FAILED {failure}" for failure in tally.failures)])


class Watch:
    """Looks at the processes of one cluster while it runs, and for them once it has ended."""

    def __init__(self, cluster: Detached, tally: Tally, temporary: Path) -> None:
        """`temporary`: the folder that this cluster has to itself for temporary files."""
        self._cluster, self._tally, self._temporary = cluster, tally, temporary
        self._runtime = cluster.runtime
        self._seen: set[psutil.Process] = set()
        self._shared: set[str] = set()
        self._series: dict[tuple[str, int], list[float]] = {}

    def look(self) -> None:
        """One sample of everything."""
        everybody = self._cluster.processes()
        self._seen.update(everybody)
        sizes = []
        for process in everybody:
            try:
                self._shared.update(_shared_names(process.pid))
                kind = "keeper" if process == self._cluster.keeper else _kind(process)
                if kind == "controller" and not _listens(process):
                    kind = "standby controller"
                if kind == "worker":
                    sizes.append(_mib(process))
                elif kind:
                    self._note(kind, process, _mib(process))
                    self._note(f"{kind}, open files", process, float(process.num_fds()))
                if kind == "arena agent":
                    self._note("arena agent, kept for workers", process, kept_mib(process.pid))
            except (psutil.Error, OSError):
                continue  # It has just ended.
        if sizes:
            self._note(LARGEST, self._cluster.keeper, max(sizes))

    def _note(self, name: str, process: psutil.Process, value: float) -> None:
        key = (name, process.pid)
        if key not in self._series:
            self._series[key] = []
            self._tally.memory.setdefault(name, []).append(self._series[key])
        self._series[key].append(round(value, 1))

    def left_over(self) -> list[str]:
        """What is still there of a cluster that has ended: processes, shared memory, files. Kills the processes."""
        _, alive = psutil.wait_procs(self._seen, timeout=LEFT_S)
        found = [f"process {p.pid} {' '.join(_command(p))[:200]}" for p in alive]
        for process in alive:
            process.kill()
        found += [f"shared memory {name}" for name in sorted(self._shared) if Path(name).exists()]
        found += [f"temporary file {path}" for path in _files(self._temporary)]
        return found + [f"run file {path}" for path in _files(self._runtime / "twinpool")]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _kind(process: psutil.Process) -> str:
    """What a process is called in the books; empty for those that aren't measured."""
    command = _command(process)
    marks = {
        "twinpool.router.main": "router", "twinpool.router.kv_index_process": "KV index",
        "arena_agent.py": "arena agent", "WorkerActor": "worker",
        "controller_process": "controller", "detached_cluster": "supervisor",
    }  # fmt: skip
    for mark, kind in marks.items():
        if any(mark in part for part in command):
            return kind
    names = {"gcs_server": "Ray's gcs_server", "raylet": "raylet"}
    return names.get(process.name(), "")


def _listens(process: psutil.Process) -> bool:
    """Whether it takes connections in: a standby controller has none, and takes over with all that is connected."""
    return any(one.status == psutil.CONN_LISTEN for one in process.net_connections(kind="tcp"))


def _mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def kept_mib(pid: int) -> float:
    """Of anonymous files that a process has open: memory that isn't mapped, so nobody's resident memory shows it."""
    total = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(FileNotFoundError):  # It has just been closed.
            if os.readlink(path).startswith("/memfd:"):
                total += os.stat(path).st_blocks * 512
    return total / 2**20


def _shared_names(pid: int) -> Iterator[str]:
    """Named shared memory that it has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/dev/shm/" in line and not line.endswith("(deleted)"):
            yield line[line.index("/dev/shm/") :]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def workers_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if any("WorkerActor" in part for part in _command(p))]


class Counters:
    """Sums of the workers' counters over all their incarnations, each of which counts from zero."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int, str], float] = {}
        self._told: Counter[str] = Counter()

    def take(self, rows: Iterable[dict[str, Any]], names: Iterable[str]) -> None:
        """From the rows of a status."""
        wanted = set(names)
        for row in rows:
            for name, value in (row.get("counters") or {}).items():
                if name in wanted or where_of(name) is not None:
                    key = (row["name"], row["incarnation"], name)
                    self._latest[key] = max(value, self._latest.get(key, 0.0))

    def damage(self) -> list[str]:
        """Whatever a worker has counted as damage, once."""
        found = [key for key, value in self._latest.items() if value and where_of(key[2]) is not None]
        for key in found:
            self._latest[key] = 0.0
        return [f"{worker}, incarnation {incarnation}: {name}" for worker, incarnation, name in found]

    def fresh(self, name: str) -> int:
        """How much has come since the last time."""
        total = int(sum(value for key, value in self._latest.items() if key[2] == name))
        told, self._told[name] = self._told[name], total
        return total - told
