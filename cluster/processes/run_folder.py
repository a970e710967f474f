"""The files of a run (temporary folder, log folder, run file), and the reaper that removes all of them but the logs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Protocol

from twinpool.cluster.processes import reaper
from twinpool.cluster.processes.process_ids import start_time
from twinpool.cluster.processes.run_file import run_file_path, write_run_file
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

    def __init__(self) -> None:
        self.temporary = new_folder()
        self.logs = new_log_folder()
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

    def __init__(self, temporary: Path, logs: Path, keeper: int) -> None:
        """`keeper`: the keeper's pid, which stands for the run in its run file."""
        self.temporary, self.logs, self._keeper = temporary, logs, keeper
        self._run_file = run_file_path(keeper)
        self._tell(f"path {self._run_file}")

    def owns(self, pid: int, started: int) -> None:
        self._tell(f"pid {pid} {started}")

    def owns_children(self) -> None:
        """Nothing to do: whatever this process starts is known by the run's mark, or by the folder."""

    def publish(self, url: str, model: str, ca: str = "", config: str = "") -> None:
        write_run_file(url, self.logs, model, ca, self._keeper, str(self.temporary), config)

    def _tell(self, line: str) -> None:
        with (self.temporary / "owned").open("a") as owned:
            owned.write(f"{line}\n")


def new_folder() -> Path:
    """Make a run's temporary folder, which only this user can enter."""
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
