"""What `twinpool serve` shows: steps with seconds, a table, one line when it is ready, then its workers' fates.

The terminal belongs to these lines. Everything else that this process or its libraries print goes to a log.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from cluster.preflight import Prepared
from contracts.clock import Clock
from contracts.ids import Role
from contracts.ports import WorkerView


class Terminal:
    """Writes to the operator's screen; any thread."""

    def __init__(self, clock: Clock, out: TextIO, began: float | None = None) -> None:
        """`began` is when the start began, if earlier than now."""
        self._clock = clock
        self._start = clock.now() if began is None else began
        self._out = out
        self._lock = threading.Lock()

    def line(self, text: str = "") -> None:
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()

    def step(self, what: str, text: str) -> None:
        """A step of the start that is done, with the seconds since the start."""
        self.line(f"  {self._clock.now() - self._start:6.1f} s  {what:<11} {text}")

    def pools(self, prepared: Prepared) -> None:
        """What each role's workers hold of each kind of state."""
        self._print(pool_table(prepared))

    def table(self, prepared: Prepared, views: Sequence[WorkerView]) -> None:
        """Workers, pages and memory."""
        self._print(worker_table(prepared, views))

    def _print(self, table: object) -> None:
        from rich.console import Console

        with self._lock:
            Console(file=self._out, highlight=False).print(table)
            self._out.flush()


def worker_table(prepared: Prepared, views: Sequence[WorkerView]) -> object:
    """A rich table: one row a worker."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    for title in ("worker", "node", "pid", "threads", "pages", "positions", "pools", "weights"):
        table.add_column(title, justify="left" if title in ("worker", "node") else "right", no_wrap=True)
    for view in views:
        page_tokens = prepared.config.cache_for(Role(view.record.role)).page_tokens
        positions = view.status.pages_total * page_tokens
        table.add_row(
            view.record.name,
            view.record.node,
            str(view.record.pid),
            str(prepared.threads),
            f"{view.status.pages_total:,}",
            f"{positions:,}",
            mib(prepared.plans[Role(view.record.role)].nbytes),
            mib(prepared.weights),
        )
    return table


def pool_table(prepared: Prepared) -> object:
    """A rich table: one row a pool of each role."""
    from rich import box
    from rich.table import Table

    from cache.pools import host_counts

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    tiers = any(prepared.config.cache_for(role).host_bytes for role in prepared.plans)
    for title in ("role", "pool", "holds", "memory", *(["host"] if tiers else []), "for"):
        table.add_column(title, justify="right" if title in ("holds", "memory", "host") else "left", no_wrap=True)
    for role, plan in prepared.plans.items():
        nbytes = prepared.config.cache_for(role).host_bytes
        host = host_counts(prepared.pool_set, nbytes, plan.counts) if nbytes else {}
        for pool in plan.pools:
            cells = [role, pool.pool, f"{pool.count:,} {pool.unit}", mib(pool.nbytes)]
            if tiers:
                cells.append(f"{host[pool.pool] - 1:,}" if host else "-")
            table.add_row(*cells, pool.purpose)
    return table


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def url_of(host: str, port: int) -> str:
    """Where clients on this machine reach the router."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def curl_line(url: str, model: str) -> str:
    """A command that can be pasted into a shell."""
    body = json.dumps({"model": model, "prompt": "It was a fine morning, and", "max_tokens": 32})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def take_over_output(log: Path) -> TextIO:
    """Send standard output and error, those of libraries and children included, to `log`; returns the real terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    return terminal
