"""The page store: storage as the KV cache uses it, pages by block hash, found, fetched and put.

A page is one object where a rank holds all of it in one piece, and then its bytes go straight between storage and host
memory. Else it is several objects (`cache.storage.object_slices`): a slice of the heads for each rank, and one of the
buffers that aren't sliced. A lookup asks for the objects that a worker of the same number of ranks would have written.
Where they aren't there, it asks whether workers of other numbers of ranks have stored theirs, by one object of each
kind first: pages that no worker has stored cost one more question, not dozens.

Of a worker of several ranks (`TPPageStore`) each stores and fetches its own heads of the pages that the leader orders.
A page is in storage when every rank has found its part, and fetched when every part has come. Before pages are stored,
the leader compares their digests, over all ranks, with those that were taken when the pages were computed: pages that
were damaged in host memory since are not stored. Each rank then seals its own objects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec, groups
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_ranks import TPPoolSet, merged
from twinpool.cache.storage.io_queue import IoQueue, StorageTicket, WriteChain
from twinpool.cache.storage.object_slices import HeadPart, ObjectSlicer, PageObjects
from twinpool.cache.storage.storage_backend import KEPT, ObjectBuffer, ObjectName, ObjectOutcome, ObjectVerdict
from twinpool.contracts.messages.rank_order_codec import OrderAnswers, OrderChannel
from twinpool.contracts.messages.rank_orders import FetchPages, FindPages, PutPages, StoredPage

T_co = TypeVar("T_co", covariant=True)
_DAMAGED = ObjectOutcome(ObjectVerdict.FAILED, 0, "it was damaged in host memory before it was stored")
_BEHIND = ObjectOutcome(ObjectVerdict.FAILED, 0, "a page before it was damaged in host memory")


class PendingResult(Protocol[T_co]):
    """The answer to an operation on storage, which comes later.

    Host pages that the operation reads or writes may not be touched before it is `done`.
    """

    @property
    def done(self) -> bool: ...

    def result(self) -> T_co:
        """Returns the answer. Only to be called once it is `done`."""

    def cancel(self) -> bool:
        """Give the operation up; returns whether it is done now. False: it still runs, so go on asking `done`."""


class FetchedPages(NamedTuple):
    """The outcome of one rank's part of a page: it is in its place in host memory if `verdict` is `FOUND`.

    Then `digests` has one digest for each group of buffers (`cache.memory.kv_cache_spec.groups`), else `reason` may say
    what went wrong.
    """

    verdict: ObjectVerdict
    digests: tuple[int, ...] = ()
    reason: str = ""


class PageStore(Protocol):
    """The interface to storage for backups, prefetches and swapped out requests. Answers are in the order of the
    pages that were asked for."""

    def exists(self, wanted: Sequence[tuple[str, bytes]]) -> PendingResult[list[bool]]:
        """Whether storage has each page, by pool and block hash; a later fetch may still find it gone or damaged."""

    def fetch(self, pages: Sequence[StoredPage]) -> PendingResult[list[ObjectOutcome]]:
        """Read pages into their places in host memory; each outcome has the digest that the page was stored with."""

    def put(
        self, pages: Sequence[StoredPage], digests: Sequence[int], chain: WriteChain | None = None
    ) -> PendingResult[list[ObjectOutcome]]:
        """Store pages from host memory, whose digests these are. A page of a `chain` is stored only if all pages
        before it in the chain are."""

    def close(self, timeout_s: float) -> bool:
        """Give up all operations that wait; returns whether all others ended within `timeout_s`.

        False: host memory may still be touched.
        """


S = TypeVar("S")
R = TypeVar("R")
_REMEMBERED = 65536
_ALL_BITS = 0xFFFFFFFFFFFFFFFF


class RankPageStore:
    """The page store of rank number `rank` of a worker's `size` ranks: its part of the pages of `host`, over its own
    storage queue."""

    def __init__(self, queue: IoQueue, host: PoolSet, fingerprint: str, rank: int = 0, size: int = 1) -> None:
        self.queue, self.host = queue, host
        width = size // host.spec.stages
        self._fingerprint, self._rank, self._size = fingerprint, rank % width, width
        self.slicer = ObjectSlicer(host.spec)
        self.plans: OrderedDict[tuple[str, bytes], tuple[HeadPart, ...]] = OrderedDict()
        """By pool and block hash: the objects of pages that were found as workers of another number of ranks have
        stored them; the next fetch uses them."""

    def exists(self, wanted: Sequence[tuple[str, bytes]]) -> PendingResult[list[bool]]:
        return _PageLookup(self, wanted)

    def fetch(self, pages: Sequence[StoredPage]) -> PendingResult[list[ObjectOutcome]]:
        return MappedResult(self.fetch_parts(pages), lambda found: merged_outcomes(self.host.spec, pages, [found]))

    def fetch_parts(self, pages: Sequence[StoredPage]) -> PendingResult[list[FetchedPages]]:
        """`fetch` of this rank's part of pages; `merged_outcomes` puts the answers of all ranks together."""
        return _PageFetch(self, pages)

    def put(
        self, pages: Sequence[StoredPage], digests: Sequence[int], chain: WriteChain | None = None
    ) -> PendingResult[list[ObjectOutcome]]:
        objects = [self._items(page, digest) for page, digest in zip(pages, digests, strict=True)]
        counts = [len(items) for items in objects]
        ticket = self.queue.submit_write([item for items in objects for item in items], chain)
        return MappedResult(ticket, lambda outcomes: _worst(outcomes, counts))

    def put_mine(
        self, pages: Sequence[StoredPage], chain: WriteChain | None = None
    ) -> PendingResult[list[ObjectOutcome]]:
        """`put` with digests that are computed here, of this rank's part: the pages were checked as a whole before."""
        digests = [self.digest(page) for page in pages]
        return self.put(pages, digests, chain)

    def close(self, timeout_s: float) -> bool:
        return self.queue.close(timeout_s)

    # ------------------------------------------------------------ names and bytes

    def name(self, pool: str, key: bytes, part: HeadPart) -> ObjectName:
        """Returns the object's name of one part of the page with block hash `key`."""
        # A page without sliced buffers has the same name, of a whole page, for any number of ranks.
        alone = not any(own.of for own in self.slicer.own(pool))
        whole = HeadPart(0, 1, part.stage, part.stages) if alone else part
        return ObjectName(self._fingerprint, pool, key, str(whole))

    def memory(self, page: StoredPage) -> torch.Tensor:
        """Returns the page's place in host memory: uint8 [unit_bytes]."""
        return self.host.layout.page(self.host.region, page.pool, page.at)

    def digest(self, page: StoredPage) -> int:
        """Returns the digest of this rank's part of a page in host memory."""
        region, digester = self.host.region, self.host.digester
        return digester.digest(region, page.pool, [page.at], [page.first], [page.end])[0]

    def grouped(self, pool: str, digest: int, shared: int) -> tuple[int, ...]:
        """Returns a digest of this rank's page by group of buffers, as `cache.pool.tp_ranks` merges them.

        `shared` is the digest of the buffers that aren't sliced, which is part of `digest`.
        """
        if len(groups(self.host.spec.by_name[pool], self._size)) == 1:
            return (digest,)
        # The group that all ranks hold alike comes last.
        return ((digest - shared) & _ALL_BITS, shared)

    def _items(self, page: StoredPage, digest: int) -> list[ObjectBuffer]:
        """Returns the objects of a page that this rank is to write: those that no rank before it holds."""
        own = self.slicer.own(page.pool)
        if len(own) == 1:
            payload = self.memory(page).numpy().data
            return [
                ObjectBuffer(self.name(page.pool, page.key, part), digest, payload) for part in own if self._first(part)
            ]
        split = self.slicer.split(page.pool, self.memory(page).view(1, -1), [digest], [page.first], [page.end])
        return [
            ObjectBuffer(self.name(page.pool, page.key, one.part), one.digests[0], one.payloads[0].numpy().data)
            for one in split
            if self._first(one.part)
        ]

    def _first(self, part: HeadPart) -> bool:
        return self._rank % (self._size // part.of if part.of else self._size) == 0


class MappedResult(Generic[S, R]):
    """The pending answer `pending`, mapped by the function `through` whenever it is read."""

    def __init__(self, pending: PendingResult[S], through: Callable[[S], R]) -> None:
        self._pending, self._through = pending, through

    @property
    def done(self) -> bool:
        return self._pending.done

    def result(self) -> R:
        return self._through(self._pending.result())

    def cancel(self) -> bool:
        return self._pending.cancel()


class _PageLookup:
    """A pending lookup, of several questions one after the other, which asking `done` drives on.

    First the objects of the own number of ranks, then whether there are any of other numbers, then all of those.
    """

    def __init__(self, page_store: RankPageStore, wanted: Sequence[tuple[str, bytes]]) -> None:
        self._page_store, self._wanted = page_store, list(wanted)
        self._found = [False] * len(self._wanted)
        self._cancelled = False
        self._steps = self._run()
        self._ticket = next(self._steps, None)

    @property
    def done(self) -> bool:
        while self._ticket is not None and self._ticket.done:
            self._ticket = None if self._cancelled else next(self._steps, None)
        return self._ticket is None

    def result(self) -> list[bool]:
        return self._found

    def cancel(self) -> bool:
        self._cancelled = True
        return self._ticket is None or self._ticket.cancel()

    def _run(self) -> Iterator[StorageTicket[list[bool]]]:
        page_store = self._page_store
        own = {pool: page_store.slicer.own(pool) for pool, _ in self._wanted}
        yield from self._ask(list(range(len(self._wanted))), own)
        missing = [i for i, found in enumerate(self._found) if not found]
        firsts = {pool: key for pool, key in (self._wanted[i] for i in reversed(missing))}
        others = [(pool, plan) for pool in firsts for plan in page_store.slicer.plans(pool) if plan != own[pool]]
        if not others:
            return
        ticket = page_store.queue.submit_exists(
            [page_store.name(pool, firsts[pool], plan[-1]) for pool, plan in others]
        )
        yield ticket
        for (pool, plan), there in zip(others, ticket.result(), strict=True):
            if there:
                left = [i for i in missing if self._wanted[i][0] == pool and not self._found[i]]
                yield from self._ask(left, {pool: plan})

    def _ask(self, which: list[int], plans: Mapping[str, tuple[HeadPart, ...]]) -> Iterator[StorageTicket[list[bool]]]:
        page_store, names, owners = self._page_store, [], []
        for i in which:
            pool, key = self._wanted[i]
            names += [page_store.name(pool, key, part) for part in plans[pool]]
            owners += [i] * len(plans[pool])
        if not names:
            return
        ticket = page_store.queue.submit_exists(names)
        yield ticket
        there = dict.fromkeys(which, True)
        for i, found in zip(owners, ticket.result(), strict=True):
            there[i] = there[i] and found
        for i in which:
            self._found[i] = there[i]
            pool, key = self._wanted[i]
            # What an earlier lookup found may be gone: the next fetch asks for what this one has found.
            page_store.plans.pop((pool, key), None)
            if there[i] and plans[pool] != page_store.slicer.own(pool):
                page_store.plans[pool, key] = plans[pool]
                while len(page_store.plans) > _REMEMBERED:
                    page_store.plans.popitem(last=False)


class _PageFetch:
    """A pending fetch: pages of one object are read in place in host memory, others are assembled by `result`."""

    def __init__(self, page_store: RankPageStore, pages: Sequence[StoredPage]) -> None:
        self._page_store, self._pages = page_store, list(pages)
        self._plans = [page_store.plans.pop((p.pool, p.key), page_store.slicer.own(p.pool)) for p in self._pages]
        self._payloads: list[list[torch.Tensor]] = []
        self._result: list[FetchedPages] | None = None
        names, into = [], []
        for page, plan in zip(self._pages, self._plans, strict=True):
            sizes = [page_store.slicer.object_bytes(page.pool, part) for part in plan]
            whole = plan == page_store.slicer.own(page.pool) and len(plan) == 1
            payloads = [page_store.memory(page)] if whole else [torch.empty(n, dtype=torch.uint8) for n in sizes]
            self._payloads.append([] if whole else payloads)
            names += [page_store.name(page.pool, page.key, part) for part in plan]
            into += [payload.numpy().data for payload in payloads]
        self._ticket = page_store.queue.submit_read(names, into)

    @property
    def done(self) -> bool:
        return self._ticket.done

    def cancel(self) -> bool:
        return self._ticket.cancel()

    def result(self) -> list[FetchedPages]:
        if self._result is None:
            self._result, outcomes = [], iter(self._ticket.result())
            for page, plan, payloads in zip(self._pages, self._plans, self._payloads, strict=True):
                self._result.append(self._one(page, plan, payloads, [next(outcomes) for _ in plan]))
        return self._result

    def _one(
        self, page: StoredPage, plan: tuple[HeadPart, ...], payloads: list[torch.Tensor], outcomes: list[ObjectOutcome]
    ) -> FetchedPages:
        for outcome in outcomes:
            if not outcome.ok:
                return FetchedPages(outcome.verdict, (), outcome.reason)
        page_store = self._page_store
        if not payloads:
            return FetchedPages(ObjectVerdict.FOUND, page_store.grouped(page.pool, outcomes[0].digest, 0))
        objects = [
            PageObjects(part, payload.view(1, -1), (outcome.digest,))
            for part, payload, outcome in zip(plan, payloads, outcomes, strict=True)
        ]
        whole = page_store.slicer.assemble(page.pool, objects, [page.first], [page.end])
        if whole.damaged:
            return FetchedPages(ObjectVerdict.DAMAGED, (), "an object of it isn't what was stored")
        page_store.memory(page).copy_(whole.pages[0])
        shared = sum(outcome.digest for part, outcome in zip(plan, outcomes, strict=True) if not part.of)
        return FetchedPages(ObjectVerdict.FOUND, page_store.grouped(page.pool, whole.digests[0], shared))


def merged_outcomes(
    spec: PoolSetSpec, pages: Sequence[StoredPage], by_rank: Sequence[Sequence[FetchedPages]]
) -> list[ObjectOutcome]:
    """Returns the outcomes of whole pages from those of the ranks' parts, `by_rank`: [ranks][pages].

    A page is `FOUND`, with the digest of the whole page, when all parts are; else it has the first bad part's verdict.
    """
    out = []
    for page, parts in zip(pages, zip(*by_rank, strict=True), strict=True):
        bad = next((part for part in parts if part.verdict is not ObjectVerdict.FOUND), None)
        if bad is not None:
            out.append(ObjectOutcome(bad.verdict, 0, bad.reason))
            continue
        shares = [[[digest] for digest in part.digests] for part in parts]
        (digest,) = merged(spec.by_name[page.pool], shares, spec.stages)
        out.append(ObjectOutcome(ObjectVerdict.FOUND, digest))
    return out


def _worst(outcomes: Sequence[ObjectOutcome], counts: Sequence[int]) -> list[ObjectOutcome]:
    """Returns one outcome a page from those of its objects, `counts[i]` for page i; `KEPT` where other ranks write all
    of them."""
    found, out = iter(outcomes), []
    for count in counts:
        mine = [next(found) for _ in range(count)]
        out.append(next((one for one in mine if not one.ok), mine[0] if mine else KEPT))
    return out


class TPPageStore:
    """The page store of a worker of several ranks: the leader's, which asks the followers to do the same."""

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
            stored = iter([_worst_of_ranks(one) for one in zip(*found, strict=True)])
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


def _worst_of_ranks(outcomes: Sequence[Sequence[Any]]) -> ObjectOutcome:
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
