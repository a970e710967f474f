"""The router's events for the log, at as little cost as possible; `contracts.json_logs` writes them."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("twinpool.router")


def log(event: str, *, level: int = logging.INFO, trace: bool = False, **fields: object) -> None:
    """Log one event; `trace` adds the traceback of the exception being handled."""
    if _logger.isEnabledFor(level):
        # Straight to the handlers: looking for the caller's line would cost more than the rest.
        trouble = sys.exc_info() if trace else None
        record = logging.LogRecord(_logger.name, level, "", 0, event, None, trouble)
        record.fields = fields
        _logger.handle(record)
