"""Structured logs: one event a line, as JSON, one file a process."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, process, logger, event, then whatever the call put into `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_file(path: Path, process: str) -> None:
    """Send this process's logs, its output and its last words at a crash to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    log_to_stream(process)


def log_to_stream(process: str) -> None:
    """Send this process's logs to its standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def last_words(path: Path, lines: int = 8, limit_bytes: int = 16_384) -> list[str]:
    """The last lines of a log, readable: events without their JSON, tracebacks by their last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit_bytes))
            raw = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
    return [text for line in raw if (text := _readable(line))]


def _readable(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line.rstrip()
    if not isinstance(entry, Mapping) or "event" not in entry:
        return line.rstrip()
    trace = str(entry.get("traceback", "")).strip().splitlines()
    return f"{entry.get('level')}: {entry['event']}" + (f" ({trace[-1]})" if trace else "")
