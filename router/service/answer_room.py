"""The room that a router has for answers: `router.max_queue` choices that have not ended, and bodies that are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.metrics.prometheus_metrics import PrometheusMetrics
from router.openai.api_errors import QueueFull


class AnswerRoom:
    """What is booked of it, a choice or a body each."""

    def __init__(self, limit: int, metrics: PrometheusMetrics) -> None:
        self.limit, self.booked, self._metrics = limit, 0, metrics

    def check(self, choices: int = 1) -> None:
        """Raise `QueueFull` where there is no room for so many choices more. Books nothing."""
        if self.booked + choices > self.limit:
            self._metrics.refused_full += 1
            text = f"the queue is full: {self.booked} of {self.limit} answers are in flight; try again later"
            raise QueueFull(text, choices)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Book one for the length of the block: of a request that isn't admitted yet."""
        self.booked += 1
        try:
            yield
        finally:
            self.booked -= 1
