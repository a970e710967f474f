"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time

_logger = logging.getLogger("twinpool.router")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = {
            "time": round(time.time(), 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log(event: str, *, level: int = logging.INFO, trace: bool = False, **fields: object) -> None:
    """Log one event; `trace` adds the traceback of the exception being handled."""
    if _logger.isEnabledFor(level):
        # Straight to the handlers: looking for the caller's line would cost more than the rest.
        trouble = sys.exc_info() if trace else None
        record = logging.LogRecord(_logger.name, level, "", 0, event, None, trouble)
        record.fields = fields
        _logger.handle(record)


def write_logs_to_stderr() -> None:
    """Send all logs of this process, libraries' included, to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
