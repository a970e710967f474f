"""What a decode worker that leaves does with its tree: the hottest prefixes are offered to the others.

When the last request has gone, the worker tells a router what it has (`PrefixOffered`), as much as
`decode.prefix_offer_bytes`, the hottest first. The router finds a worker with room for each and has it fetch
(`decode.migration.prefix_push`). Nobody is waited for for long: an offer that wasn't taken up within `PATIENCE_S` is
void, and a worker that nobody asks leaves.
"""

from __future__ import annotations

from cache.manager.kv_cache_manager import KVCacheManager
from cache.prefix_cache.hot_prefixes import hottest
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.ids import RequestId, Role
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.worker_events import PrefixOffered
from decode.migration.prefix_push import PrefixPushes
from decode.request.request import DecodeRequest
from worker.request_table import RequestTable

PATIENCE_S = 1.0


class PrefixOffers:
    """One drain's offers."""

    def __init__(
        self,
        name: str,
        manager: KVCacheManager,
        prefix_pushes: PrefixPushes,
        request_table: RequestTable[DecodeRequest],
        config: Config,
        clock: Clock,
    ) -> None:
        self._name, self._manager, self._prefix_pushes, self._request_table, self._clock = (
            name,
            manager,
            prefix_pushes,
            request_table,
            clock,
        )
        reuse = config.cache_for(Role.DECODE).prefix_reuse
        self._pages = config.decode.prefix_offer_bytes // manager.spec.whole.unit_bytes(manager.full) if reuse else 0
        self._number = 0
        self._open = 0
        """Told, and not asked for yet."""
        self._until: float | None = None
        self.session: SessionId | None = None
        """Of the router that spoke last; nobody else knows of whom there are."""

    @property
    def over(self) -> bool:
        """Whether nobody need be waited for any more."""
        return (
            self._until is not None and not self._prefix_pushes and (not self._open or self._clock.now() >= self._until)
        )

    @property
    def next_deadline(self) -> float | None:
        # What is being given ends by its own deadlines, and patience then changes nothing any more.
        return self._until if not self._prefix_pushes and not self.over else None

    def round(self) -> None:
        """Of a worker that drains: begin, once it has nothing else to do."""
        if self._until is not None or len(self._request_table):
            return
        self._until = self._clock.now() + PATIENCE_S
        if self.session is None or not self._pages:
            return
        for hot in hottest(self._manager.tree, self._manager.full, self._pages):
            self._number += 1
            name = RequestId(f"offer-{self._name}-{self._number}")
            self._request_table.emit(self.session, PrefixOffered(name, 0, hot.tokens, hot.salt))
            self._open += 1

    def asked_for(self) -> None:
        """One of them was."""
        self._open = max(0, self._open - 1)

    def withdraw(self) -> None:
        """The worker stays: what is being given, is; nothing else."""
        self._until, self._open = None, 0
