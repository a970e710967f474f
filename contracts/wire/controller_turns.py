"""The endpoints of a cluster's controllers, of which one leads: they are tried in turn until the leader is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed

NOT_LEADING = "this controller doesn't lead any more"
"""What a controller answers that has been replaced, or that can't reach its ledger."""
CONNECT_S = 0.5
"""Seconds that one of several controllers has to take a connection before the next is tried."""
TURN_S = 0.2
"""Seconds between two tries, of two controllers."""
T = TypeVar("T")


class ControllerTurns:
    """The endpoints, and whose turn it is. Used on one event loop."""

    def __init__(self, endpoints: str) -> None:
        """`endpoints`: ``host:port``, several with commas (`contracts.config.ledger_place` checks such lists)."""
        self._endpoints = endpoints.split(",")
        self._at = 0

    def __str__(self) -> str:
        return ", ".join(self._endpoints)

    @property
    def current(self) -> str:
        return self._endpoints[self._at]

    @property
    def several(self) -> bool:
        return len(self._endpoints) > 1

    def next(self, failed: str) -> None:
        """Take the next endpoint from now on where `failed` is the current one: it doesn't answer or doesn't lead."""
        if failed == self.current:
            self._at = (self._at + 1) % len(self._endpoints)


async def call_leader(
    turns: ControllerTurns,
    channel_to: Callable[[str], CallChannel],
    call: Callable[[CallChannel], Awaitable[T]],
    timeout_s: float,
) -> T:
    """Make one call of the controller that leads; returns what `call` returns, which is begun on one channel only that
    is connected to a controller that leads. Raises `CallFailed`, and `TimeoutError` where none was found in time."""
    async with asyncio.timeout(timeout_s):
        while True:
            endpoint = turns.current
            async with channel_to(endpoint) as channel:
                if not turns.several or await channel.connected(CONNECT_S):
                    try:
                        return await call(channel)
                    except CallFailed as error:
                        if error.reason != NOT_LEADING:  # Which it says before it does anything.
                            raise
            turns.next(endpoint)
            await asyncio.sleep(TURN_S)
