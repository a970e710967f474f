"""The page store of a worker of several ranks: each rank stores and fetches its own heads of the pages that the leader
orders.

A page is in storage when every rank has found its part, and fetched when every part has come. Before pages are stored,
the leader compares their digests, over all ranks, with those that were taken when the pages were computed: pages that
were damaged in host memory since are not stored. Each rank then seals its own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.cache.pool.tp_ranks import TPPoolSet
from twinpool.cache.storage.io_queue import WriteChain
from twinpool.cache.storage.page_store import FetchedPages, MappedResult, PendingResult, RankPageStore, merged_outcomes
from twinpool.cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from twinpool.contracts.messages.rank_order_codec import OrderAnswers, OrderChannel
from twinpool.contracts.messages.rank_orders import FetchPages, FindPages, PutPages, StoredPage

_DAMAGED = ObjectOutcome(ObjectVerdict.FAILED, 0, "it was damaged in host memory before it was stored")
_BEHIND = ObjectOutcome(ObjectVerdict.FAILED, 0, "a page before it was damaged in host memory")


class TPPageStore:
    """The leader's `PageStore`."""

    def __init__(self, mine: RankPageStore, host: TPPoolSet, followers: OrderChannel) -> None:
        self._mine, self._host, self._followers = mine, host, followers
        self._chain: WriteChain | None = None
        self._number = 0
        """The number of the last chain, by which followers know it. All pages of a chain are ordered before those of
        the next."""
        self._broken = False
        """Whether a page of the last chain was damaged: no page behind it is stored."""
        self.closed = False

    def exists(self, wanted: Sequence[tuple[str, bytes]]) -> PendingResult[list[bool]]:
        both = self._of_all(self._mine.exists(wanted), FindPages(tuple(wanted)))
        return MappedResult(both, lambda found: [all(ranks) for ranks in zip(*found, strict=True)])

    def fetch(self, pages: Sequence[StoredPage]) -> PendingResult[list[ObjectOutcome]]:
        both = self._of_all(self._mine.fetch_parts(pages), FetchPages(tuple(pages)))

        def together(found: list[list[Any]]) -> list[ObjectOutcome]:
            parts = [
                [FetchedPages(ObjectVerdict(verdict), tuple(digests), reason) for verdict, digests, reason in one]
                for one in found
            ]
            return merged_outcomes(self._host.spec, pages, parts)

        return MappedResult(both, together)

    def put(
        self, pages: Sequence[StoredPage], digests: Sequence[int], chain: WriteChain | None = None
    ) -> PendingResult[list[ObjectOutcome]]:
        good = self._sound(pages, digests)
        refused = [None if sound else _DAMAGED for sound in good]
        number = 0
        if chain is not None:
            if chain is not self._chain:
                self._chain, self._number, self._broken = chain, self._number + 1, False
            number = self._number
            whole = 0 if self._broken else next((i for i, sound in enumerate(good) if not sound), len(good))
            refused[whole:] = [outcome or _BEHIND for outcome in refused[whole:]]
            self._broken = whole < len(good)
        chosen = [page for page, outcome in zip(pages, refused, strict=True) if outcome is None]
        both = self._of_all(self._mine.put_mine(chosen, chain), PutPages(tuple(chosen), number))

        def together(found: list[list[Any]]) -> list[ObjectOutcome]:
            stored = iter([_worst(one) for one in zip(*found, strict=True)])
            return [outcome or next(stored) for outcome in refused]

        return MappedResult(both, together)

    def _sound(self, pages: Sequence[StoredPage], digests: Sequence[int]) -> list[bool]:
        """Returns, for each page, whether its bytes in host memory still match its digest."""
        good = [False] * len(pages)
        for pool in dict.fromkeys(page.pool for page in pages):
            mine = [i for i, page in enumerate(pages) if page.pool == pool]
            found = self._host.digest(
                pool, [pages[i].at for i in mine], [pages[i].first for i in mine], [pages[i].end for i in mine]
            )
            for i, digest in zip(mine, found, strict=True):
                good[i] = digest == digests[i]
        return good

    def _of_all(self, mine: PendingResult[Any], order: FindPages | FetchPages | PutPages) -> _LeaderAndFollowers:
        return _LeaderAndFollowers(mine, self._followers.ask(order), self)

    def close(self, timeout_s: float) -> bool:
        """As `RankPageStore.close`: of this rank's operations. Followers' answers aren't waited for any more: they have
        memory of their own, and one that is dead never gives one."""
        self.closed = True
        return self._mine.close(timeout_s)


def _worst(outcomes: Sequence[Sequence[Any]]) -> ObjectOutcome:
    found = [ObjectOutcome(ObjectVerdict(verdict), digest, reason) for verdict, digest, reason in outcomes]
    return next((one for one in found if not one.ok), found[0])


class _LeaderAndFollowers:
    """The pending answers of all ranks, the leader's first, by rank."""

    def __init__(self, mine: PendingResult[Any], others: OrderAnswers, store: TPPageStore) -> None:
        self._mine, self._others, self._store = mine, others, store

    @property
    def done(self) -> bool:
        return self._mine.done and (self._others.done or self._store.closed)

    def result(self) -> list[list[Any]]:
        return [self._mine.result(), *self._others.wait()]

    def cancel(self) -> bool:
        """Cancel the leader's part; returns whether all parts are done now. Followers go on, and it is done when they
        have answered."""
        self._mine.cancel()
        return self.done


class FollowerPageStore:
    """A follower's page store: it carries out the leader's orders, and answers each when storage has."""

    def __init__(self, page_store: RankPageStore) -> None:
        self._page_store = page_store
        self._open: list[tuple[int, PendingResult[list[Any]]]] = []
        self._chain, self._number = WriteChain(), 0

    def carry_out(self, sequence: int, order: FindPages | FetchPages | PutPages) -> None:
        """Begin to carry out an order; `answers` returns its answer later, under the number `sequence`."""
        match order:
            case FindPages():
                self._open.append((sequence, self._page_store.exists(order.wanted)))
            case FetchPages():
                self._open.append((sequence, self._page_store.fetch_parts(order.pages)))
            case PutPages():
                if order.chain and order.chain != self._number:
                    self._chain, self._number = WriteChain(), order.chain
                chain = self._chain if order.chain else None
                self._open.append((sequence, self._page_store.put_mine(order.pages, chain)))

    def answers(self) -> list[tuple[int, list[Any]]]:
        """Returns the answers that storage has given since the last call, each with the number of its order."""
        ended = [(sequence, pending) for sequence, pending in self._open if pending.done]
        self._open = [entry for entry in self._open if entry not in ended]
        return [(sequence, pending.result()) for sequence, pending in ended]

    def close(self, timeout_s: float) -> bool:
        return self._page_store.close(timeout_s)
