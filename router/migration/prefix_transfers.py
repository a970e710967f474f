"""Transfers of prefixes that a draining decode worker has offered to other decode workers. No I/O.

Each prefix goes to one worker: of those to which the fewest tokens are under way, the one with the most free pages. The
target takes only what fits beside what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import RequestId, RoomId
from twinpool.contracts.messages.router_commands import Command, PullPrefix, PushPrefix
from twinpool.contracts.messages.worker_events import PrefixOffered, PullDone, PushReady
from twinpool.router.state.worker_table import WorkerKey, WorkerTable

PATIENCE_S = 30.0
"""Seconds after which an offer that hasn't ended is forgotten."""


@dataclass(frozen=True, slots=True)
class _PrefixTransfer:
    source: WorkerKey
    target: WorkerKey
    room: RoomId
    offered: PrefixOffered
    until: float


class PrefixTransfers:
    """All prefix transfers of one router."""

    def __init__(
        self,
        clock: Clock,
        workers: WorkerTable,
        mint_room: Callable[[], str],
        send: Callable[[WorkerKey, Command], None],
    ) -> None:
        self._clock, self._workers, self._mint_room, self._send = clock, workers, mint_room, send
        self._offers: dict[RequestId, _PrefixTransfer] = {}
        self._promised: Counter[WorkerKey] = Counter()
        """For each worker the tokens of prefixes under way to it; its status doesn't count them yet."""
        self.bytes = 0
        """Bytes of state that targets have taken over."""

    def __len__(self) -> int:
        return len(self._offers)

    def on_event(self, worker: WorkerKey, event: PrefixOffered | PushReady | PullDone) -> bool:
        """Take in an event; returns False where it isn't about an offer."""
        if isinstance(event, PrefixOffered):
            self._place(worker, event)
            return True
        offer = self._offers.get(event.request_id)
        if offer is None:
            return False
        if isinstance(event, PullDone):
            self.bytes += event.bytes
            self._drop(offer)
        elif not event.positions:
            self._drop(offer)
        else:
            source, offered = self._workers.get(offer.source), offer.offered
            if source is not None:
                tokens = offered.tokens[: event.positions]
                fetch = PullPrefix(offered.request_id, 0, offer.room, source.peer, tokens, offered.salt, True)
                self._send(offer.target, fetch)
        return True

    def _place(self, worker: WorkerKey, offered: PrefixOffered) -> None:
        now = self._clock.now()
        able = self._workers.able(self._workers.roles[-1], len(offered.tokens), {worker: float("inf")}, now)
        source = self._workers.get(worker)
        if source is not None:
            able = able.of_class({source.handover})
        if not able or offered.request_id in self._offers:
            return
        # Pages are of one size on all workers, so their numbers can be compared: fewest promised, then most free.
        target = min(able, key=lambda e: (self._promised[e.key], -e.status.pages_free, e.turn))
        offer = _PrefixTransfer(worker, target.key, RoomId(self._mint_room()), offered, now + PATIENCE_S)
        self._offers[offered.request_id] = offer
        self._promised[target.key] += len(offered.tokens)
        self._send(worker, PushPrefix(offered.request_id, 0, offer.room, target.peer, offered.tokens, offered.salt))

    def _drop(self, offer: _PrefixTransfer) -> None:
        del self._offers[offer.offered.request_id]
        self._promised[offer.target] -= len(offer.offered.tokens)
        if self._promised[offer.target] <= 0:
            del self._promised[offer.target]

    def tick(self) -> None:
        """Forget offers that haven't ended in time."""
        now = self._clock.now()
        for offer in [o for o in self._offers.values() if now >= o.until]:
            self._drop(offer)
