"""What is on its way from the controller to those that have a stream: orders to a supervisor, changes to a router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from twinpool.cluster.controller.controller_actions import ControllerAction
from twinpool.contracts.messages.cluster_view import ClusterView

MAX_ORDERS = 64 * 1024
"""Orders that may wait for a supervisor that doesn't read, before its stream is ended."""


class SupervisorLine:
    """Orders on their way to one supervisor."""

    def __init__(self) -> None:
        self._orders: list[ControllerAction] = []
        self._more = asyncio.Event()
        self.ended = ""
        """Why the line is over; empty while it is not."""

    def send(self, orders: Sequence[ControllerAction]) -> None:
        self._orders += orders
        if len(self._orders) > MAX_ORDERS:
            self.end("the supervisor doesn't read its orders")
        elif orders:
            self._more.set()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._more.set()

    async def next(self) -> list[ControllerAction]:
        """The orders since the last call, once there are some; none when the line has ended."""
        await self._more.wait()
        self._more.clear()
        orders, self._orders = self._orders, []
        return [] if self.ended else orders


class WatcherLine:
    """Changes of the table on their way to one watcher."""

    def __init__(self, takes_changes: bool, answers: bool = False) -> None:
        self.answers = answers
        """Whether it answers questions about requests."""
        self.takes_changes = takes_changes
        """Whether changes will do; else the watcher gets the whole table each time."""
        self.changes: list[ClusterView] = []
        self.more = asyncio.Event()
