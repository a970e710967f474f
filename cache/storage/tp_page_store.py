"""Storage of a worker of several ranks: each puts by and fetches its own heads, the leader says of what.

A page is there when every rank has found its part, and fetched when every part has come. Before pages are put by, the
leader compares their digest, of all ranks, with the seal that they got when they were computed: what was damaged in
host memory since is not stored. Each rank then seals its own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache.pool.tp_pool_set import TPPoolSet
from cache.storage.io_queue import WriteChain
from cache.storage.page_store import FetchedPages, PendingResult
from cache.storage.rank_page_store import MappedResult, RankPageStore, merged_outcomes
from cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from contracts.messages.rank_order_codec import OrderAnswers, OrderChannel
from contracts.messages.rank_orders import FetchPages, FindPages, PutPages, StoredPage

_DAMAGED = ObjectOutcome(ObjectVerdict.FAILED, 0, "it was damaged in host memory before it was stored")


class TPPageStore:
    """The leader's `PageStore`."""

    def __init__(self, mine: RankPageStore, host: TPPoolSet, followers: OrderChannel) -> None:
        self._mine, self._host, self._followers = mine, host, followers
        self._chain: WriteChain | None = None
        self._number = 0
        """Of the last chain, as the followers know it: what belongs to one is ordered together."""

    def exists(self, wanted: Sequence[tuple[str, bytes]]) -> PendingResult[list[bool]]:
        both = _LeaderAndFollowers(self._mine.exists(wanted), self._followers.ask(FindPages(tuple(wanted))))
        return MappedResult(both, lambda found: [all(ranks) for ranks in zip(*found, strict=True)])

    def fetch(self, pages: Sequence[StoredPage]) -> PendingResult[list[ObjectOutcome]]:
        both = _LeaderAndFollowers(self._mine.fetch_parts(pages), self._followers.ask(FetchPages(tuple(pages))))

        def together(found: list[list[Any]]) -> list[ObjectOutcome]:
            parts = [[FetchedPages(ObjectVerdict(verdict), tuple(digests), reason) for verdict, digests, reason in one]
                     for one in found]  # fmt: skip
            return merged_outcomes(self._host.spec, pages, parts)

        return MappedResult(both, together)

    def put(
        self, pages: Sequence[StoredPage], digests: Sequence[int], chain: WriteChain | None = None
    ) -> PendingResult[list[ObjectOutcome]]:
        good = self._sound(pages, digests)
        chosen = [page for page, sound in zip(pages, good, strict=True) if sound]
        number = 0
        if chain is not None:
            if chain is not self._chain:
                self._chain, self._number = chain, self._number + 1
            number = self._number
        both = _LeaderAndFollowers(
            self._mine.put_mine(chosen, chain), self._followers.ask(PutPages(tuple(chosen), number))
        )

        def together(found: list[list[Any]]) -> list[ObjectOutcome]:
            stored = iter([_worst(one) for one in zip(*found, strict=True)])
            return [next(stored) if sound else _DAMAGED for sound in good]

        return MappedResult(both, together)

    def _sound(self, pages: Sequence[StoredPage], digests: Sequence[int]) -> list[bool]:
        """Which pages are still what they were sealed as."""
        good = [False] * len(pages)
        for pool in dict.fromkeys(page.pool for page in pages):
            mine = [i for i, page in enumerate(pages) if page.pool == pool]
            found = self._host.digest(
                pool, [pages[i].at for i in mine], [pages[i].first for i in mine], [pages[i].end for i in mine]
            )
            for i, digest in zip(mine, found, strict=True):
                good[i] = digest == digests[i]
        return good

    def close(self, timeout_s: float) -> bool:
        return self._mine.close(timeout_s)


def _worst(outcomes: Sequence[Sequence[Any]]) -> ObjectOutcome:
    found = [ObjectOutcome(ObjectVerdict(verdict), digest, reason) for verdict, digest, reason in outcomes]
    return next((one for one in found if not one.ok), found[0])


class _LeaderAndFollowers:
    """The leader's own answer and the followers', by rank."""

    def __init__(self, mine: PendingResult[Any], others: OrderAnswers) -> None:
        self._mine, self._others = mine, others

    @property
    def done(self) -> bool:
        return self._mine.done and self._others.done

    def result(self) -> list[list[Any]]:
        return [self._mine.result(), *self._others.wait()]

    def cancel(self) -> bool:
        """Followers' storage goes on: it is done when they have answered."""
        self._mine.cancel()
        return self.done


class FollowerPageStore:
    """A follower's shelf, and the orders about it, which are answered when storage has."""

    def __init__(self, page_store: RankPageStore) -> None:
        self._page_store = page_store
        self._open: list[tuple[int, PendingResult[list[Any]]]] = []
        self._chain, self._number = WriteChain(), 0

    def carry_out(self, sequence: int, order: FindPages | FetchPages | PutPages) -> None:
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
        """What storage has answered since the last call, by the order's number."""
        ended = [(sequence, pending) for sequence, pending in self._open if pending.done]
        self._open = [entry for entry in self._open if entry not in ended]
        return [(sequence, pending.result()) for sequence, pending in ended]

    def close(self, timeout_s: float) -> bool:
        return self._page_store.close(timeout_s)
