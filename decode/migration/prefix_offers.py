"""Prefix offers: a decode worker that leaves offers the hottest prefixes of its tree to the others.

When the last request has gone, the worker tells a router what it has (`PrefixOffered`), as much as
`decode.prefix_offer_bytes`, the hottest first. The router finds a worker with room for each and has it fetch
(`decode.migration.prefix_push`). The worker doesn't wait long: an offer that isn't taken up within `PATIENCE_S` is
void, and a worker that no router asks leaves.
"""

from __future__ import annotations

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.prefix_cache.hot_prefixes import hottest
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.worker_events import PrefixOffered
from twinpool.decode.migration.prefix_push import PrefixPushes
from twinpool.decode.request.request import DecodeRequest
from twinpool.decode.request.request_outcomes import RouterEvent
from twinpool.worker.request_table import RequestTable

PATIENCE_S = 1.0
"""Seconds that a worker waits for its offers to be taken up."""


class PrefixOffers:
    """The offers of one worker; see the module's prose."""

    def __init__(
        self,
        name: str,
        manager: KVCacheManager,
        prefix_pushes: PrefixPushes,
        requests: RequestTable[DecodeRequest],
        config: Config,
        clock: Clock,
    ) -> None:
        self._name, self._manager, self._prefix_pushes = name, manager, prefix_pushes
        self._requests, self._clock = requests, clock
        reuse = config.cache_for(Role.DECODE).prefix_reuse
        self._pages = config.decode.prefix_offer_bytes // manager.spec.whole.unit_bytes(manager.full) if reuse else 0
        self._number = 0
        self._open = 0
        """Offers that were made and not taken up yet."""
        self._until: float | None = None
        """When open offers are void, in seconds of the clock; None before they are made."""
        self._session: SessionId | None = None
        """That of the router that spoke last: routers alone know the other workers."""

    @property
    def over(self) -> bool:
        """Whether offers were made, none is worth waiting for, and no push is under way: the worker may leave."""
        return (
            self._until is not None and not self._prefix_pushes and (not self._open or self._clock.now() >= self._until)
        )

    @property
    def next_deadline(self) -> float | None:
        # Pushes under way end by their own deadlines; until then `PATIENCE_S` changes nothing.
        return self._until if not self._prefix_pushes and not self.over else None

    def heard_from(self, session: SessionId) -> None:
        """Note that the router of this session sent a command: offers go to it."""
        self._session = session

    def offer(self) -> list[RouterEvent]:
        """Return the offers, once, of a draining worker that has no requests any more; none at other times."""
        if self._until is not None or len(self._requests):
            return []
        self._until = self._clock.now() + PATIENCE_S
        if self._session is None or not self._pages:
            return []
        told = []
        for hot in hottest(self._manager.tree, self._manager.full, self._pages):
            self._number += 1
            name = RequestId(f"offer-{self._name}-{self._number}")
            told.append(RouterEvent(self._session, PrefixOffered(name, 0, hot.tokens, hot.salt)))
        self._open += len(told)
        return told

    def asked_for(self) -> None:
        """Count one offer as taken up."""
        self._open = max(0, self._open - 1)

    def withdraw(self) -> None:
        """Void the offers, as the worker stays; pushes under way go on."""
        self._until, self._open = None, 0
