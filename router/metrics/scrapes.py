"""Scrapes of one router: its metrics are collected in pieces between other work, and written in a thread.

With a thousand workers a scrape is ten thousands of lines. Made in one go on the event loop it would stop every stream
for seconds, and whoever asks for /metrics again and again would stop them for good. So one is made at a time, and all
who come while it is made share the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, cast

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_KIND = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_KIND = "text/plain; version=0.0.4; charset=utf-8"
# Both ask nothing of a registry but `collect`.
_plain = cast(Callable[[Any], bytes], generate_latest)
_encode = cast(Callable[[Any], bytes], partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8))


class Families(Protocol):
    """What has metrics to write."""

    def collect(self) -> Iterable[Metric]: ...


def wants_openmetrics(accept: str) -> bool:
    """Return whether a scrape would rather have OpenMetrics; `accept`: its header, which may be empty."""
    wanted = {kind: weight for kind, weight in map(_weighed, accept.split(",")) if kind}
    text = max(wanted.get(kind, 0.0) for kind in ("text/plain", "text/*", "*/*"))
    return wanted.get(OPENMETRICS, 0.0) > 0 and wanted[OPENMETRICS] >= text


def expose(families: Families, *, opened: bool) -> tuple[bytes, str]:
    """Return all metrics and their content type. `opened`: in OpenMetrics, else in Prometheus' text. The library's own
    choice would replace the colon of ``vllm:...`` in OpenMetrics, as if it weren't allowed there."""
    return (_encode(families), OPENMETRICS_KIND) if opened else (_plain(families), TEXT_KIND)


def _weighed(accepted: str) -> tuple[str, float]:
    """Return a media type that is accepted, and its weight from 0 to 1; of a weight that isn't a number 0."""
    kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return kind, float(parameter[2:])
            except ValueError:
                return kind, 0.0
    return kind, 1.0


PIECE_S = 0.002
"""Seconds of collecting after which other work has its turn."""


class Collected:
    """Families that were collected, as what writes them takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def nothing() -> Iterator[Metric]:
    return iter(())


class Scrapes:
    """Answers to scrapes; on one event loop."""

    def __init__(self, collect: Callable[[], Iterator[Metric]], seen: Callable[[], Iterator[Metric]] = nothing) -> None:
        """`collect` yields families on the loop, and holds nothing between two of them that the loop's other work
        changes. `seen` is called on the loop and yields its families in a thread: it reads what doesn't change."""
        self._collect, self._seen = collect, seen
        self._turn = asyncio.Lock()
        self._next: dict[bool, asyncio.Task[tuple[bytes, str]]] = {}
        """The answers that are not begun yet, by whether they are in OpenMetrics."""

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type, as the header `accept` asks for it."""
        opened = wants_openmetrics(accept)
        task = self._next.get(opened)
        if task is None:
            task = self._next[opened] = asyncio.get_running_loop().create_task(self._make(opened))
        return await asyncio.shield(task)  # A client that leaves takes the answer from nobody else.

    async def _make(self, opened: bool) -> tuple[bytes, str]:
        async with self._turn:
            del self._next[opened]
            families: list[Metric] = []
            seen = self._seen()
            began = time.perf_counter()
            for family in self._collect():
                families.append(family)
                if time.perf_counter() - began > PIECE_S:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
            return await asyncio.to_thread(_write, families, seen, opened=opened)


def _write(families: list[Metric], seen: Iterator[Metric], *, opened: bool) -> tuple[bytes, str]:
    return expose(Collected([*families, *seen]), opened=opened)
