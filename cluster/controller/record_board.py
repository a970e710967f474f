"""What routers tell of requests: the controller's ring of their records, and questions to routers about one request.

A router reports only a part of what it has, so a request that isn't in the ring is looked for at the routers that watch
the table: the question goes out on their streams, and the answers come with `ReportRecords`. A question ends when all
have answered, or after `ASK_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinpool.contracts.messages.request_record import MAX_RECENT, RecordRing, RequestRecord, in_order

MAX_RECORDS = 2_000
MAX_BYTES = 32 * 1024**2
ASK_S = 1.5
"""Seconds that routers have for an answer."""
MAX_ASKS = 64
"""Questions that are open at once; a further one is refused."""


class TooManyAsks(Exception):
    """Raised when so many requests are looked for at once that no further one is."""


@dataclass(eq=False, slots=True)
class _RecordAsk:
    routers: int
    """How many were asked."""
    answered: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class BoardAnswer:
    """What was found of a request."""

    records: Sequence[RequestRecord]
    asked: int = 0
    answered: int = 0


class RecordBoard:
    """The records of all routers, as far as they are told; on the controller's loop."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.ring: RecordRing[RequestRecord] = RecordRing(MAX_RECORDS, MAX_BYTES)
        self._wall = wall
        self._asks: dict[int, _RecordAsk] = {}
        self._number = 0

    def recent(self, count: int) -> list[RequestRecord]:
        """The newest records, `count` at most, the newest first."""
        return self.ring.recent(min(count, MAX_RECENT))

    @property
    def kept_s(self) -> float:
        """How far back the ring goes, in seconds."""
        return self.ring.kept_s(self._wall())

    def take(self, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]) -> None:
        """Take in a router's report, and its answers to questions; late ones are nobody's any more."""
        for record in records:
            self.ring.put(record)
        for number, found in answers:
            ask = self._asks.get(number)
            if ask is None:
                continue
            ask.records += found
            ask.answered += 1
            if ask.answered >= ask.routers:
                ask.over.set()

    async def find(self, asked: str, ask_routers: Callable[[int, str], int]) -> BoardAnswer:
        """The records that an id asks for. `ask_routers`: puts a question, with its number, to all routers that answer
        such; returns how many these are. Raises `TooManyAsks`."""
        if found := self.ring.find(asked):
            return BoardAnswer(in_order(found))
        if len(self._asks) >= MAX_ASKS:
            raise TooManyAsks(f"{MAX_ASKS} requests are looked for already; ask again")
        self._number += 1
        ask = _RecordAsk(0)
        self._asks[self._number] = ask
        try:
            ask.routers = ask_routers(self._number, asked)
            if ask.routers > ask.answered:
                async with asyncio.timeout(ASK_S):
                    await ask.over.wait()
        except TimeoutError:
            pass
        finally:
            self._asks = {number: one for number, one in self._asks.items() if one is not ask}
        return BoardAnswer(in_order(ask.records), ask.routers, ask.answered)
