"""The page store: storage as the KV cache uses it, pages by block hash, found, fetched and put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from twinpool.cache.storage.io_queue import WriteChain
from twinpool.cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from twinpool.contracts.messages.rank_orders import StoredPage

T_co = TypeVar("T_co", covariant=True)


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
