"""Swapped out state: the pages and slots of a request off the device, in host memory or on storage.

`SwappedState` says where it is, as a table. `SwapStorage` takes it on to storage to free host memory, and back when its
request is to return. Objects are named as the tree's are, by block hash, so full pages of a prompt may be there
already; the last, partly filled page has the block hash of exactly its tokens. Fetched state counts only if every page
of every pool came with the tag that it was swapped out with. Storage may refuse, lose or damage any page. State that
storage refuses stays on the host; state that storage lost or damaged is `LOST`, and its request computed again. A page
that came whole with another tag counts as lost, not as damaged: workers with other numbers of ranks round otherwise,
and the object is of the worker that stored these tokens first.

A storage thread reads or writes host memory for as long as its operation takes, even if the request is dropped
meanwhile. So the pages of an operation are pinned until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.pool.page_allocator import Lease, Pin
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.tree_node import NodeLock, TokenPrefix
from twinpool.cache.storage.page_store import PageStore, PendingResult
from twinpool.cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from twinpool.cache.swap.offload import OffloadedPages
from twinpool.contracts.messages.rank_orders import StoredPage
from twinpool.contracts.state_table import StateTable


class SwapPlace(StrEnum):
    """Where swapped out state is."""

    SAVING = "saving"
    """On its way to host memory: the device's pages are pinned."""
    HOST = "host"
    STORING = "storing"
    """In host memory, on its way to storage."""
    STORED = "stored"
    """On storage alone: it has no leases of the host."""
    FETCHING = "fetching"
    """On its way from storage into host memory."""
    LOST = "lost"
    """Some of its pages are missing or damaged: the state is of no use."""
    GONE = "gone"
    """Dropped."""


class SwapEvent(StrEnum):
    SAVED = "saved"
    PUT = "put"
    STORED = "stored"
    REFUSED = "refused"
    FETCH = "fetch"
    FETCHED = "fetched"
    FAILED = "failed"
    DISCARD = "discard"


PLACES = StateTable[SwapPlace, SwapEvent](
    "swapped out state",
    {
        SwapPlace.SAVING: {
            SwapEvent.SAVED: SwapPlace.HOST,
            SwapEvent.FAILED: SwapPlace.LOST,
            SwapEvent.DISCARD: SwapPlace.GONE,
        },
        SwapPlace.HOST: {SwapEvent.PUT: SwapPlace.STORING, SwapEvent.DISCARD: SwapPlace.GONE},
        SwapPlace.STORING: {
            SwapEvent.STORED: SwapPlace.STORED,
            SwapEvent.REFUSED: SwapPlace.HOST,
            SwapEvent.DISCARD: SwapPlace.GONE,
        },
        SwapPlace.STORED: {SwapEvent.FETCH: SwapPlace.FETCHING, SwapEvent.DISCARD: SwapPlace.GONE},
        SwapPlace.FETCHING: {
            SwapEvent.FETCHED: SwapPlace.HOST,
            SwapEvent.FAILED: SwapPlace.LOST,
            SwapEvent.DISCARD: SwapPlace.GONE,
        },
        SwapPlace.LOST: {SwapEvent.DISCARD: SwapPlace.GONE},
    },
)
ON_HOST = (SwapPlace.SAVING, SwapPlace.HOST, SwapPlace.STORING, SwapPlace.FETCHING)
"""The places in which swapped out state has leases of the host."""


@dataclass(eq=False)
class SwappedState:
    """The state of one request after `positions` positions: of every pool what the next position needs.

    The request owns it until `SwappedRequests.drop`. The first `kept` pages of the full pool stay in the tree's host
    tier, where `above` locks them; everything else was copied into leases of its own.
    """

    owner: str
    prefix: TokenPrefix
    """The whole pages of these positions."""
    positions: int
    """The committed length at the swap-out: the state is that of exactly these tokens."""
    pages: int
    """Pages of all positions that the allocation was made for."""
    kept: int
    above: NodeLock
    numbers: Mapping[str, range]
    """By pool: the numbers of the pages (and of the slot) that were copied, in order."""
    saved: OffloadedPages
    digests: dict[str, dict[int, int]] = field(default_factory=dict)
    """Digests of whole pages by pool and page number: those sealed on the device; once settled, those copied too."""
    place: SwapPlace = SwapPlace.SAVING
    damage: dict[str, list[int]] = field(default_factory=dict)
    """The page numbers, by pool, that made the state `LOST` because their bytes aren't what was sealed."""
    storable: bool = True
    """False once storage has refused it."""

    def turn(self, turn: SwapEvent) -> None:
        """Change `place` by an event; raises `IllegalTransition` for one that `PLACES` doesn't have."""
        self.place = PLACES.next(self.place, turn)

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return self.saved.nbytes

    @property
    def leases(self) -> int:
        """How many pages and slots of the host it holds, in all pools."""
        return sum(self.leased(pool) for pool in self.numbers)

    def leased(self, pool: str) -> int:
        """How many host pages or slots of `pool` it holds; 0 once they are released."""
        lease = self.saved.leases.get(pool)
        return len(lease) if lease is not None and lease.live else 0

    def check(self) -> list[str]:
        found = []
        for pool, numbers in self.numbers.items():
            due = len(numbers) if self.place in ON_HOST else 0
            if self.leased(pool) != due and not (self.place is SwapPlace.SAVING and self.saved.done):
                found.append(f"{self.owner}: it is {self.place} and has {self.leased(pool)} {pool} pages on the host")
        if len(self.prefix) != self.positions // self.prefix.page_tokens:
            found.append(
                f"{self.owner}: {self.positions} positions are swapped out under {len(self.prefix)} whole pages"
            )
        if sum(len(part) for part in self.above.parts) != self.kept:
            found.append(f"{self.owner}: {self.kept} of its pages are the tree's, its lock says otherwise")
        return found


# ---------------------------------------------------------------- to storage and back

_BATCH_PAGES = 64
"""The most pages in one operation of storage: each operation has a deadline."""


@dataclass(eq=False, slots=True)
class _Batch:
    """One operation of storage, on pages (or the slot) of one pool."""

    pool: str
    numbers: Sequence[int]
    """The numbers of the pages in their request."""
    digests: Sequence[int]
    """The digests that they were swapped out with."""
    pending: PendingResult[list[ObjectOutcome]]


@dataclass(eq=False)
class _SwapTransfer:
    """The store or the fetch of one swapped out request's state, under way."""

    swapped: SwappedState
    pins: list[Pin]
    batches: list[_Batch]

    @property
    def done(self) -> bool:
        return all(batch.pending.done for batch in self.batches)


class SwapStorage:
    """Stores and fetches swapped out state; see the module. Single-threaded; nothing here waits."""

    def __init__(self, host: PoolSet, page_store: PageStore, lease: Callable[[str, int], Lease]) -> None:
        """`lease` leases pages of a host pool, evicting those that only the tree holds; raises `CapacityError`."""
        self._host, self._page_store, self._lease = host, page_store, lease
        self._under: list[_SwapTransfer] = []
        self.counters = {"swapped_stored": 0.0, "swapped_fetched": 0.0, "swapped_refused": 0.0, "swapped_lost": 0.0}

    @property
    def busy(self) -> bool:
        return bool(self._under)

    def takes(self, swapped: SwappedState) -> bool:
        """Whether `store` accepts the state: it has digests to verify it by, and storage hasn't refused it before."""
        return swapped.saved.digests is not None and swapped.storable

    def store(self, swapped: SwappedState, keys: Sequence[bytes]) -> None:
        """Begin to store the state; `keys` are the block hashes of all its pages, the last, partly filled one too."""
        swapped.turn(SwapEvent.PUT)
        self._begin(swapped, keys, self._page_store.put)

    def fetch(self, swapped: SwappedState, keys: Sequence[bytes]) -> None:
        """Begin to bring the state back to newly leased host pages; `keys` as for `store`.

        Raises `CapacityError` without room there, with nothing taken.
        """
        leases: dict[str, Lease] = {}
        try:
            for pool, numbers in swapped.numbers.items():
                leases[pool] = self._lease(pool, len(numbers))
        except BaseException:
            for lease in leases.values():
                lease.release()
            raise
        swapped.saved.move_to(leases)
        swapped.turn(SwapEvent.FETCH)
        self._begin(swapped, keys, lambda pages, digests: self._page_store.fetch(pages))

    def _begin(
        self,
        swapped: SwappedState,
        keys: Sequence[bytes],
        way: Callable[[Sequence[StoredPage], Sequence[int]], PendingResult[list[ObjectOutcome]]],
    ) -> None:
        assert swapped.saved.digests is not None, "what has no tags can't be told from anything else on storage"
        pins = [lease.pin(f"{swapped.place} {swapped.owner}") for lease in swapped.saved.leases.values()]
        under = _SwapTransfer(swapped, pins, [])
        self._under.append(under)
        for pool, pages in self._pages(swapped, keys).items():
            digests = swapped.saved.digests[pool]
            for at in range(0, len(pages), _BATCH_PAGES):
                part = slice(at, at + _BATCH_PAGES)
                pending = way(pages[part], digests[part])
                under.batches.append(_Batch(pool, swapped.numbers[pool][part], digests[part], pending))

    def _pages(self, swapped: SwappedState, keys: Sequence[bytes]) -> Mapping[str, list[StoredPage]]:
        out = {}
        for pool, numbers in swapped.numbers.items():
            extent, indices = swapped.saved.extents[pool], swapped.saved.leases[pool].indices
            out[pool] = [
                StoredPage(pool, keys[n], at, first, end)
                for n, at, first, end in zip(numbers, indices, extent.firsts, extent.ends, strict=True)
            ]
        return out

    def poll(self) -> None:
        """Take in stores and fetches that have ended: `place` of their state becomes `STORED`, `HOST` or `LOST`."""
        for under in [u for u in self._under if u.done]:
            self._under.remove(under)
            for pin in under.pins:
                pin.release()
            if under.swapped.place is SwapPlace.STORING:
                self._stored(under)
            elif under.swapped.place is SwapPlace.FETCHING:
                self._fetched(under)

    def _stored(self, under: _SwapTransfer) -> None:
        swapped = under.swapped
        if all(outcome.ok for batch in under.batches for outcome in batch.pending.result()):
            swapped.turn(SwapEvent.STORED)
            swapped.saved.release()
            self.counters["swapped_stored"] += 1
        else:
            swapped.turn(SwapEvent.REFUSED)
            swapped.storable = False
            self.counters["swapped_refused"] += 1

    def _fetched(self, under: _SwapTransfer) -> None:
        swapped = under.swapped
        good = True
        for batch in under.batches:
            for number, digest, outcome in zip(batch.numbers, batch.digests, batch.pending.result(), strict=True):
                good = good and outcome.ok and outcome.digest == digest
                if outcome.verdict is ObjectVerdict.DAMAGED:
                    swapped.damage.setdefault(batch.pool, []).append(number)
        swapped.turn(SwapEvent.FETCHED if good else SwapEvent.FAILED)
        self.counters["swapped_fetched" if good else "swapped_lost"] += 1
        if not good:
            swapped.saved.release()
