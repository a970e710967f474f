"""What the KV cache asks of storage: pages by block hash, fetched and put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from cache.storage.io_queue import WriteChain
from cache.storage.storage_backend import ObjectOutcome, ObjectVerdict
from contracts.messages.rank_orders import StoredPage

T_co = TypeVar("T_co", covariant=True)


class PendingResult(Protocol[T_co]):
    """An answer that comes later. Nothing that it names may be touched before it is `done`."""

    @property
    def done(self) -> bool: ...

    def result(self) -> T_co:
        """Once it is done."""

    def cancel(self) -> bool:
        """Nobody wants it any more. Whether it is done now; False: ask again later."""


class FetchedPages(NamedTuple):
    """What became of a page: it is in its place if `verdict` is `FOUND`, with these digests by group of buffers."""

    verdict: ObjectVerdict
    digests: tuple[int, ...] = ()
    reason: str = ""


class PageStore(Protocol):
    """What savers and prefetches know of storage."""

    def exists(self, wanted: Sequence[tuple[str, bytes]]) -> PendingResult[list[bool]]:
        """Whether storage has each page, by pool and block hash; a later fetch may still find it gone or damaged."""

    def fetch(self, pages: Sequence[StoredPage]) -> PendingResult[list[ObjectOutcome]]:
        """Read pages of one pool into host memory; each outcome has the digest that the page was stored with."""

    def put(
        self, pages: Sequence[StoredPage], digests: Sequence[int], chain: WriteChain | None = None
    ) -> PendingResult[list[ObjectOutcome]]:
        """Store pages, which have these digests; an outcome each. None of a `chain` without those before it."""

    def close(self, timeout_s: float) -> bool:
        """Whether nothing touches host memory any more."""
