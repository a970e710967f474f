"""The cluster that a command acts on: the one that was named, else the only one, else for a look the newest.

`--url` names it, else TWINPOOL_URL does. A command that changes something refuses to choose among several clusters of
this machine. Which cluster it is, is said first, on standard error: what a script reads on standard output stays as it
is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.cli.admin_client import AdminClient, ClusterNotFound
from twinpool.cluster.processes.run_folder import START_REPORT, RunFile, live_runs
from twinpool.contracts.errors import ConfigError


@dataclass(frozen=True)
class ChosenCluster:
    """A cluster, and how it came to be chosen."""

    url: str
    run: RunFile | None
    """The cluster's run file; None where it isn't one of this machine, or another user's."""
    why: str
    """How it was chosen, in words; empty where the command line names it."""
    several: bool = False
    """Whether it is one of several, and nobody named it."""

    @property
    def up_s(self) -> float | None:
        """Seconds since it first served; None where that isn't known here."""
        return time.time() - self.run.since if self.run is not None and self.run.since else None

    def start_report(self) -> list[str]:
        """What `serve` wrote down of its start: how nodes are divided, and what workers hold."""
        file = Path(self.run.logs) / START_REPORT if self.run is not None else None
        if file is None or not file.is_file():
            return ["how its nodes were divided at the start isn't known here: see the logs where it was started"]
        return ["", f"at the start ({file}):", *file.read_text(errors="replace").splitlines()]

    @property
    def line(self) -> str:
        """What is said of it first."""
        named = f"cluster {self.url}" if self.run is None else f"cluster {described(self.run)}"
        return named + (f" ({self.why})" if self.why else "")


def choose(url: str | None, *, changes: bool) -> ChosenCluster:
    """Choose a cluster. `changes`: whether the command changes something. Raises `ClusterNotFound` where there is none,
    and `ConfigError` where a command that changes something would have to choose."""
    given = url or os.environ.get("TWINPOOL_URL", "")
    runs = live_runs()
    if given:
        run = next((run for run in runs if run.url == given.rstrip("/")), None)
        return ChosenCluster(given, run, "" if url else "of TWINPOOL_URL")
    if not runs:
        raise ClusterNotFound("no cluster is running on this machine; start one with twinpool serve, or give --url")
    if len(runs) == 1:
        return ChosenCluster(runs[0].url, runs[0], "the only one on this machine")
    if changes:
        said = f"{len(runs)} clusters run on this machine, and nothing was changed: say which one it is for"
        raise ConfigError(f"{said}\n{listed(runs)}")
    why = f"the newest of {len(runs)} on this machine; --url chooses another"
    return ChosenCluster(runs[0].url, runs[0], why, several=True)


def client_for(
    url: str | None, ca: str, *, changes: bool, say: Callable[[str], None] | None = None
) -> tuple[AdminClient, ChosenCluster]:
    """Choose a cluster and say which it is; returns a client of it. `say`: None for standard error. Raises as `choose`,
    and `ConfigError` for a URL that is none."""
    chosen = choose(url, changes=changes)
    (say or to_stderr)(chosen.line)
    operator = AdminClient.at(chosen.url, ca) if chosen.run is None else AdminClient.of_run(chosen.run, ca)
    return operator, chosen


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def described(run: RunFile) -> str:
    """A cluster's URL, model, time and file, in words."""
    parts = [f"{run.url}, model {run.model}"]
    if run.since:
        parts.append(f"up {duration(time.time() - run.since)}")
    if run.config:
        parts.append(f"of {run.config}")
    if run.folder:
        parts.append("detached")
    return ", ".join(parts)


def listed(runs: Sequence[RunFile]) -> str:
    """A line for each cluster, that begins with the flag that chooses it."""
    return "\n".join(f"  --url {described(run)}" for run in runs)


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    left = max(0, round(seconds))
    days, hours, minutes = left // 86400, left // 3600 % 24, left // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left % 60} s" if minutes else f"{left} s"
