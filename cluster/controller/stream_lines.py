"""What is on its way from the controller to those that have a stream: orders to a supervisor, changes to a router.

Changes of settings are passed on as orders to the supervisor, which has the settings (`SettingsOrders`); the controller
keeps none, and waits for the answer. Making a change again is safe, so one whose answer is lost, with the supervisor or
with its stream, is made again by whoever asked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from twinpool.cluster.controller.controller_actions import ControllerAction
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.cluster_view import ClusterView
from twinpool.contracts.messages.pool_changes import MAX_SETTINGS_BYTES, SettingsAnswer, SettingsChange

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


ANSWER_S = 15.0
"""Seconds that a supervisor has to answer: it may be starting again, measuring a node, or starting processes."""
Send = Callable[[SettingsChange], None]


class SettingsOrders:
    """The one change that is under way at a time. Use it on one event loop."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._numbers = itertools.count(1)
        self._waiting: tuple[int, asyncio.Future[SettingsAnswer]] | None = None
        self._sent = False
        """Whether the change that waits for its answer was sent: one that waits for a supervisor goes to the next."""
        self._send: Send | None = None
        self._there = asyncio.Event()

    def come(self, send: Send) -> None:
        """Note that a supervisor has come; `send` sends it an order."""
        self._send = send
        self._there.set()

    async def change(self, change: SettingsChange) -> SettingsAnswer:
        """Have the supervisor make a change, once there is one.

        Raises `ConfigError` where it refuses, isn't there or doesn't answer in time, or goes away.
        """
        if len(change.settings) > MAX_SETTINGS_BYTES:
            raise ConfigError(f"settings have at most {MAX_SETTINGS_BYTES} bytes, got {len(change.settings)}")
        if self._waiting is not None:
            raise ConfigError("another change of settings is being made; try again")
        number = next(self._numbers)
        future: asyncio.Future[SettingsAnswer] = asyncio.get_running_loop().create_future()
        self._waiting = number, future
        self._sent = sent = False
        try:
            async with asyncio.timeout(self._answer_s):
                while (send := self._send) is None:
                    await self._there.wait()
                send(replace(change, number=number))
                self._sent = sent = True
                answer = await future
        except TimeoutError:
            text = f"the supervisor has not answered in {self._answer_s:g} s, and may yet make the change; try again"
            away = f"no supervisor is there to change the settings (waited {self._answer_s:g} s for it); try again"
            raise ConfigError(text if sent else away) from None
        finally:
            self._waiting = None
        if answer.refusal:
            raise ConfigError(answer.refusal)
        return answer

    def take(self, answers: Iterable[SettingsAnswer]) -> None:
        """Take in what a supervisor answers; nobody waits for the answer to an earlier change any more."""
        for answer in answers:
            if self._waiting is not None and self._waiting[0] == answer.number and not self._waiting[1].done():
                self._waiting[1].set_result(answer)

    def lost(self) -> None:
        """Note that the supervisor is gone, or another one has come."""
        self._send = None
        self._there.clear()
        if self._sent and self._waiting is not None and not self._waiting[1].done():
            text = "the supervisor went away before it had answered, and may have made the change; try again"
            self._waiting[1].set_exception(ConfigError(text))
