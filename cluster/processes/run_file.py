"""The run file, by which `status`, `drain` and `check` find a live cluster on this machine.

There is one JSON file for each run, named after the pid of `serve`. A file whose process is gone (or whose pid belongs
to another process by now) is stale: it is ignored and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cluster.processes.process_ids import same_process, start_time


@dataclass(frozen=True, slots=True)
class RunFile:
    """The content of a run file."""

    url: str
    """Where the router answers operators."""
    pid: int
    started: int
    """Start time of `pid`, as `cluster.processes.process_ids.start_time` gives it."""
    logs: str
    model: str
    ca: str = ""
    """The file of certificates by which the URL's is checked; empty: the system's."""
    folder: str = ""
    """The folder of a detached cluster; empty where the cluster ends with its terminal."""
    config: str = ""
    """The configuration's file that it was launched with, an absolute path; empty: none."""


def runs_folder() -> Path:
    """The folder of run files, which only this user can enter; made if needed. Raises `OSError` where none can be
    made."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    for candidate in (base, str(Path.home() / ".cache"), tempfile.gettempdir()):
        if candidate:
            folder = Path(candidate) / "twinpool"
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if os.access(folder, os.W_OK):
                    return folder
    raise OSError("no folder for run files: set XDG_RUNTIME_DIR to a folder that can be written")


def write_run_file(
    url: str, logs: Path, model: str, ca: str = "", keeper: int | None = None, folder: str = "", config: str = ""
) -> Path:
    """Write a run's file, atomically; returns its path. `keeper`: the pid of a detached run's keeper; None: this
    process's, with which the run ends. `folder`: a detached run's. `config`: the configuration's file."""
    pid = os.getpid() if keeper is None else keeper
    run = RunFile(url, pid, start_time(pid) or 0, str(logs), model, ca, folder, config)
    path = run_file_path(pid)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(run)))
    fresh.replace(path)
    return path


def run_file_path(pid: int) -> Path:
    return runs_folder() / f"run-{pid}.json"


def newest_live_run(url: str = "") -> RunFile | None:
    """The newest run whose process is alive, and whose `url` this is where one is given; stale files are removed on
    the way."""
    return _newest(lambda run: not url or run.url == url.rstrip("/"))


def live_run_of(config: Path) -> RunFile | None:
    """The newest run whose process is alive and that was launched with the configuration's file `config`."""
    return _newest(lambda run: run.config == str(config.absolute()))


def _newest(wanted: Callable[[RunFile], bool]) -> RunFile | None:
    found: list[tuple[float, RunFile]] = []
    for path in runs_folder().glob("run-*.json"):
        try:
            tree = json.loads(path.read_text())
            # Other builds may write more.
            run = RunFile(**{one.name: tree[one.name] for one in fields(RunFile) if one.name in tree})
            if not same_process(run.pid, run.started):
                path.unlink(missing_ok=True)
            elif wanted(run):
                found.append((path.stat().st_mtime, run))
        except (OSError, ValueError, TypeError):
            continue
    return max(found, key=lambda item: item[0])[1] if found else None
