"""The run file, by which `status`, `drain` and `check` find a live cluster on this machine.

There is one JSON file for each run, named after the pid of `serve`. A file whose process is gone (or whose pid belongs
to another process by now) is stale: it is ignored and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from twinpool.cluster.processes.process_ids import same_process, start_time
from twinpool.contracts.outside_data import read_json

START_REPORT = "start.txt"
"""The file beside a run's logs with what `serve` found and decided at its start."""


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
    since: float = 0.0
    """When it first served, in seconds since 1970; 0: an older build wrote this."""


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
    before = _read(path)  # Another build's supervisor takes the same run over.
    run = replace(run, since=before.since if before is not None and before.started == run.started else time.time())
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(run)))
    fresh.replace(path)
    return path


def run_file_path(pid: int) -> Path:
    return runs_folder() / f"run-{pid}.json"


def newest_live_run(url: str = "") -> RunFile | None:
    """The newest run whose process is alive, and whose `url` this is where one is given."""
    return next((run for run in live_runs() if not url or run.url == url.rstrip("/")), None)


def live_run_of(config: Path) -> RunFile | None:
    """The newest run whose process is alive and that was launched with the configuration's file `config`."""
    return next((run for run in live_runs() if run.config == str(config.absolute())), None)


def live_runs() -> list[RunFile]:
    """The runs of this user whose process is alive, the newest first; stale files are removed on the way."""
    found: list[tuple[float, RunFile]] = []
    for path in runs_folder().glob("run-*.json"):
        with contextlib.suppress(OSError):
            run = _read(path)
            if run is None:
                continue
            if same_process(run.pid, run.started):
                found.append((path.stat().st_mtime, run))
            else:
                path.unlink(missing_ok=True)
    return [run for _, run in sorted(found, key=lambda item: item[0], reverse=True)]


def _read(path: Path) -> RunFile | None:
    """The run of a file; None where it can't be read."""
    try:
        tree = read_json(path.read_text())
        # Other builds may write more.
        return RunFile(**{one.name: tree[one.name] for one in fields(RunFile) if one.name in tree})
    except (OSError, ValueError, TypeError):
        return None
