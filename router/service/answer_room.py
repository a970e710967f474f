"""The room that a router has for answers: `router.max_queue` choices that have not ended, or that requests ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.openai.api_errors import QueueFull


class AnswerRoom:
    """What is booked of it: a place for each choice, and what requests hold that aren't admitted yet."""

    def __init__(self, limit: int, metrics: PrometheusMetrics) -> None:
        self.limit, self._metrics = limit, metrics
        self.choices = 0
        """Places of choices that have begun."""
        self._opening: dict[asyncio.Task[object], int] = {}
        """Places that requests hold while they are read or looked for, by the task of each."""

    @property
    def booked(self) -> int:
        """All places that are taken."""
        return self.choices + sum(self._opening.values())

    def check(self, choices: int = 1) -> None:
        """Raise `QueueFull` where there is no room for so many choices more. Books nothing."""
        if self.booked + choices > self.limit:
            self._metrics.refused_full += 1
            text = f"the queue is full: {self.booked} of {self.limit} answers are in flight; try again later"
            raise QueueFull(text, choices)

    @contextmanager
    def hold(self, places: int = 1) -> Iterator[None]:
        """Take places for the length of the block, in which the request is waited for; not to be nested.

        Whoever begins its choices does so before anything else is awaited: then the places are still free.
        """
        task = asyncio.current_task()
        assert task is not None
        assert task not in self._opening, "one request holds places once"
        self._opening[task] = places
        try:
            yield
        finally:
            del self._opening[task]

    def ended_holders(self) -> int:
        """Requests that hold places and have ended: 0, unless places are lost."""
        return sum(task.done() for task in self._opening)
