"""The KV index's process: ``python -m twinpool.router.kv_index_process --controller HOST:PORT --table PATH``.

One a host: it follows the KV events of the workers that it can reach, and its routers map the table. It logs JSON lines
to standard error and ends on SIGTERM or SIGINT. Exit codes: 0 after a signal, 1 when something failed, 2 for wrong
usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import read_config_json
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import Role
from twinpool.contracts.json_logs import log, log_to_stream
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.signal_listener import SignalListener
from twinpool.router.kv_indexer.event_feed import EventFeed
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.links.controller_directory import ControllerDirectory

WAIT_S = 0.2
"""Seconds that a round waits for events."""


class WatchedViews:
    """The controller's table, watched on an event loop in a thread of its own; only the latest is kept."""

    def __init__(self, target: str, config: Config) -> None:
        certificate = config.security.cluster
        self._directory = ControllerDirectory(target, config.transfer.link_timeout_s, certificate)
        self._latest: tuple[WorkerView, ...] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=asyncio.run, args=(self._watch(),), name="controller", daemon=True)
        self._thread.start()

    def take(self) -> tuple[WorkerView, ...] | None:
        """Return the table if it has changed since the last call."""
        with self._lock:
            latest, self._latest = self._latest, None
        return latest

    async def _watch(self) -> None:
        self._directory.watch(self._put)
        await asyncio.Event().wait()

    def _put(self, views: tuple[WorkerView, ...]) -> None:
        with self._lock:
            self._latest = views


def follow(feed: EventFeed, views: WatchedViews, stop: threading.Event) -> None:
    """Follow the workers of the table until asked to stop."""
    while not stop.is_set():
        if (table := views.take()) is not None:
            feed.follow(table)
        feed.round(WAIT_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="twinpool.router.kv_index_process", description="The KV index of one host's routers."
    )
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    parser.add_argument("--table", type=Path, required=True, help="where the routers find the table")
    parser.add_argument("--config-json", type=Path, help="the whole configuration as JSON")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor that is told when the table is there")
    options = parser.parse_args(arguments)
    log_to_stream("kv index")
    stop = threading.Event()
    SignalListener((signal.SIGTERM, signal.SIGINT), lambda number: stop.set()).listen()
    try:
        config = read_config_json(options.config_json)
        page_tokens = config.cache_for(Role.PREFILL).page_tokens
        size = TableSize.of_bytes(config.router.kv_index_bytes)
        feed = EventFeed(
            TableMemory.create(options.table, size, page_tokens),
            SystemClock(),
            socket.gethostname(),
            Path(key) if (key := config.security.curve_key) else None,
        )
        log("KV index begins", blocks=size.entries, bytes=size.bytes)
        if options.ready_fd is not None:
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)
        follow(feed, WatchedViews(options.controller, config), stop)
        feed.close()
    except (TwinpoolError, OSError) as error:
        log("KV index failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
