"""What a run leaves on disk: its folders, its logs, and the run file by which commands find it.

The reaper removes all of it but the logs: a file for each process, whose last lines say why the process died.

By the run file `status`, `drain` and `check` find a live cluster on this machine. There is one JSON file for each run,
named after the pid of `serve`. A file whose process is gone (or whose pid belongs to another process by now) is stale:
it is ignored and removed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Protocol

from twinpool.cluster.processes import reaper
from twinpool.cluster.processes.process_ids import same_process, start_time
from twinpool.contracts.json_logs import log_to_stream
from twinpool.contracts.outside_data import read_json
from twinpool.contracts.python_command import script_command

KEPT_LOGS = 20
SOCKET_PATH_ROOM = 40
"""The longest temporary folder's path, in characters, below which a run's folder is made: Ray puts sockets deep below
it, and the kernel takes 107 characters for the whole path."""


class RunFiles(Protocol):
    """The folders of one run, and what its end removes."""

    temporary: Path
    logs: Path

    def owns(self, pid: int, started: int) -> None:
        """Have the process `pid`, with start time `started`, ended with the run."""

    def owns_children(self) -> None:
        """Have all processes that descend from this process now ended with the run."""

    def publish(self, url: str, model: str, ca: str = "", config: str = "") -> None:
        """Write the run file: from now on the other commands find this run."""


class RunFolder:
    """The folders and the run file of one run. However this process ends, the reaper removes all of them but the
    logs."""

    def __init__(self, within: Path | None = None, logs: Path | None = None) -> None:
        """`within`: the temporary folder of the run that has begun this one, and ends it with itself. `logs`: the
        folder of its logs; None: a new one."""
        self.temporary = new_folder(within)
        self.logs = logs or new_log_folder()
        self.mark = self.temporary.name
        reading, self._pipe = os.pipe()
        self._reaper = subprocess.Popen(
            [
                *script_command(str(reaper.__file__), str(reading), self.mark, str(self.temporary)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=[reading],
            start_new_session=True,
        )
        os.close(reading)
        # Every process that is started from here on inherits the mark, by which the reaper finds it.
        os.environ[reaper.MARK] = self.mark
        self._run_file = run_file_path(os.getpid())
        self._tell(f"path {self._run_file}")

    def owns(self, pid: int, started: int) -> None:
        """Have the reaper end the process `pid`, with start time `started`, too."""
        self._tell(f"pid {pid} {started}")

    def owns_children(self) -> None:
        """Have the reaper end all processes that descend from this process now; later ones need another call."""
        import psutil

        for child in psutil.Process().children(recursive=True):
            if child.pid != self._reaper.pid:
                self.owns(child.pid, start_time(child.pid) or 0)

    def publish(self, url: str, model: str, ca: str = "", config: str = "") -> None:
        """Write the run file: from now on the other commands find this run."""
        write_run_file(url, self.logs, model, ca, config=config)

    def close(self) -> None:
        """Remove the run file, have the reaper remove the rest, and wait for it. Idempotent."""
        self._run_file.unlink(missing_ok=True)
        os.environ.pop(reaper.MARK, None)
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(3.0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode() + b"\n")


class KeptFolder:
    """The folders of a detached run, which the keeper removes (`cluster.processes.keeper`)."""

    def __init__(self, temporary: Path, logs: Path, keeper: int, *, found: bool = True) -> None:
        """`keeper`: the keeper's pid, which stands for the run in its run file. `found`: whether it has one; of several
        models, commands find the run of all."""
        self.temporary, self.logs, self._keeper, self._found = temporary, logs, keeper, found
        self._run_file = run_file_path(keeper)
        self._tell(f"path {self._run_file}")

    def owns(self, pid: int, started: int) -> None:
        self._tell(f"pid {pid} {started}")

    def owns_children(self) -> None:
        """Nothing to do: whatever this process starts is known by the run's mark, or by the folder."""

    def publish(self, url: str, model: str, ca: str = "", config: str = "") -> None:
        if self._found:
            write_run_file(url, self.logs, model, ca, self._keeper, str(self.temporary), config)

    def _tell(self, line: str) -> None:
        with (self.temporary / "owned").open("a") as owned:
            owned.write(f"{line}\n")


def new_folder(within: Path | None = None) -> Path:
    """Make a run's temporary folder, which only this user can enter. `within`: that of the run which has begun this one
    (`cluster.processes.reaper`)."""
    if within is not None:
        return Path(tempfile.mkdtemp(prefix=f"{within.name}.", dir=within.parent))
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="twinpool-", dir=base if len(base) < SOCKET_PATH_ROOM else "/tmp"))


def new_log_folder() -> Path:
    """Make a folder for one run's logs, and remove the oldest folders but `KEPT_LOGS`, this one included."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    parent = Path(state) / "twinpool" / "logs"
    parent.mkdir(parents=True, exist_ok=True)
    earlier = sorted((p for p in parent.iterdir() if p.is_dir()), key=lambda p: p.name)
    for old in earlier[: -KEPT_LOGS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = parent / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


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


def log_to_file(path: Path, process: str) -> None:
    """Send this process's logs, standard output and error, and the stacks of a crash (faulthandler) to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    log_to_stream(process)


def last_words(path: Path, lines: int = 8, limit_bytes: int = 16_384) -> list[str]:
    """The last lines of a log as text for the operator: JSON events as their text, tracebacks as their last line. Empty
    where the log can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit_bytes))
            raw = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
    return [text for line in raw if (text := _readable(line))]


def indented(lines: Sequence[str]) -> str:
    """Lines as they are appended to an operator's line."""
    return "".join(f"\n    {line}" for line in lines)


def _readable(line: str) -> str:
    try:
        entry = read_json(line)
    except ValueError:
        return line.rstrip()
    if not isinstance(entry, Mapping) or "event" not in entry:
        return line.rstrip()
    trace = str(entry.get("traceback", "")).strip().splitlines()
    return f"{entry.get('level')}: {entry['event']}" + (f" ({trace[-1]})" if trace else "")
