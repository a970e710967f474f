"""The log files of a run, one a process, and the last lines of a process that died."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from twinpool.contracts.json_logs import log_to_stream
from twinpool.contracts.outside_data import read_json


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


def _readable(line: str) -> str:
    try:
        entry = read_json(line)
    except ValueError:
        return line.rstrip()
    if not isinstance(entry, Mapping) or "event" not in entry:
        return line.rstrip()
    trace = str(entry.get("traceback", "")).strip().splitlines()
    return f"{entry.get('level')}: {entry['event']}" + (f" ({trace[-1]})" if trace else "")
