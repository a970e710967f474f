"""Structured logs, alike in every process: one event a line, as JSON."""

from __future__ import annotations

import logging
import sys
import time

from twinpool.contracts.compact_json import compact_json

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "fields", "color_message"}
_router = logging.getLogger("twinpool.router")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, event, then the call's `extra` or the record's `fields`."""

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
        line.update(getattr(record, "fields", {}))
        # Libraries hang notes of their own on records, with a leading underscore.
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("_")})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return compact_json(line, str)


def log_to_stream(process: str) -> None:
    """Send all logs of this process, libraries' included, to its standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def log(event: str, *, level: int = logging.INFO, trace: bool = False, **fields: object) -> None:
    """Log one event of a router, at little cost; `trace` adds the traceback of the exception that is being
    handled."""
    if _router.isEnabledFor(level):
        # Straight to the handlers: looking for the caller's line would cost more than the rest.
        trouble = sys.exc_info() if trace else None
        record = logging.LogRecord(_router.name, level, "", 0, event, None, trouble)
        record.fields = fields
        _router.handle(record)
