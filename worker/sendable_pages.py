"""What of a request's state can be handed over now: the sealed part of what the reader wants, pool by pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache.allocation.allocation import Allocation
from cache.memory.page_digest import ContentTag
from transfer.rooms.room_outcomes import SendablePages


def finished(
    wanted: Mapping[str, range],
    allocation: Allocation,
    chain: Sequence[bytes],
    ends: Mapping[str, int],
    most: Mapping[str, int] | None = None,
) -> dict[str, SendablePages]:
    """The next pages and slots of `wanted`, up to the first that isn't sealed.

    `chain` has the keys of all its pages, the last partly filled one included; `ends` the digests at its end, by pool.
    `most`: so many of each pool at once.
    """
    out = {}
    for pool, left in wanted.items():
        tags = []
        for number in left if most is None else left[: most[pool]]:
            digest = _sealed(allocation, pool, number, ends if number == len(chain) - 1 else {})
            if digest is None:
                break
            tags.append(ContentTag(chain[number], digest))
        if tags:
            places = (
                allocation.tables[pool][left.start :] if pool in allocation.tables else allocation.slots[pool].indices
            )
            out[pool] = SendablePages(left.start, tuple(places[: len(tags)]), tuple(tags))
    return out


def _sealed(allocation: Allocation, pool: str, number: int, ends: Mapping[str, int]) -> int | None:
    """The digest of a page or state by its number; None while it isn't finished."""
    whole = allocation.digests.get(pool, ())
    return whole[number] if number < len(whole) else ends.get(pool)
