"""Storage of a worker of several ranks, at its leader: which pages it orders to be stored, and what it says of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from twinpool.cache.pool.tp_ranks import TPPoolSet
from twinpool.cache.storage.io_queue import WriteChain
from twinpool.cache.storage.page_store import RankPageStore, TPPageStore
from twinpool.cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from twinpool.contracts.messages.rank_orders import PutPages, StoredPage

STORED = ObjectOutcome(ObjectVerdict.STORED)


class Done:
    """An answer that is there at once, of either kind."""

    done = True

    def __init__(self, outcomes: Sequence[ObjectOutcome]) -> None:
        self._outcomes = list(outcomes)

    def result(self) -> list[ObjectOutcome]:
        return self._outcomes

    def wait(self) -> list[list[ObjectOutcome]]:
        return [self._outcomes]


class Ranks:
    """The leader's own storage, its followers and its host memory, in which pages at `damaged` are not as sealed."""

    def __init__(self, damaged: set[int]) -> None:
        self.damaged = damaged
        self.mine: list[list[int]] = []
        self.ordered: list[tuple[list[int], int]] = []
        self.answer, self.ends = True, True
        """Whether followers answer, and whether the leader's own threads end in time."""

    def close(self, timeout_s: float) -> bool:
        return self.ends

    def put_mine(self, pages: Sequence[StoredPage], chain: WriteChain | None) -> Done:
        self.mine.append([page.at for page in pages])
        return Done([STORED] * len(pages))

    def ask(self, order: PutPages) -> Done:
        self.ordered.append(([page.at for page in order.pages], order.chain))
        answered = Done([STORED] * len(order.pages))
        answered.done = self.answer
        return answered

    def digest(self, pool: str, at: Sequence[int], firsts: Any, ends: Any) -> list[int]:
        return [0 if page in self.damaged else 7 for page in at]


def put(store: TPPageStore, at: Sequence[int], chain: WriteChain | None) -> list[bool]:
    pages = [StoredPage("full", b"key %d" % i, i, 4 * i, 4 * i + 4) for i in at]
    return [outcome.ok for outcome in store.put(pages, [7] * len(pages), chain).result()]


def leader(ranks: Ranks) -> TPPageStore:
    return TPPageStore(cast(RankPageStore, ranks), cast(TPPoolSet, ranks), cast(Any, ranks))


def test_no_page_of_a_chain_is_stored_behind_a_damaged_one_and_the_next_chain_begins_anew() -> None:
    ranks = Ranks({2})
    store, chain = leader(ranks), WriteChain()
    assert put(store, [0, 1], chain) == [True, True]
    assert put(store, [5, 2, 3], chain) == [True, False, False]
    assert put(store, [4], chain) == [False], "it is behind the damaged one as well"
    assert put(store, [6], WriteChain()) == [True]
    assert ranks.mine == [[0, 1], [5], [], [6]]
    assert ranks.ordered == [([0, 1], 1), ([5], 1), ([], 1), ([6], 2)]


def test_pages_of_no_chain_are_stored_beside_a_damaged_one() -> None:
    ranks = Ranks({2})
    assert put(leader(ranks), [1, 2, 3], None) == [True, False, True]
    assert ranks.mine == [[1, 3]]
    assert ranks.ordered == [([1, 3], 0)]


@pytest.mark.parametrize("ends", [True, False])
def test_who_closes_waits_for_no_follower(ends: bool) -> None:
    """One that is dead never answers; what it still does goes to memory of its own."""
    ranks = Ranks(set())
    ranks.answer, ranks.ends = False, ends
    store = leader(ranks)
    pending = store.put([StoredPage("full", b"key", 0, 0, 4)], [7])
    assert not pending.done
    assert store.close(1.0) is ends
    assert pending.done
