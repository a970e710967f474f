"""The pages and slots of a request that can be handed over now: sealed, and wanted by the receiver, pool by pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinpool.cache.allocation import Allocation
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.transfer.rooms.room_outcomes import SendablePages


def portion(spec: PoolSetSpec, nbytes: int) -> dict[str, int]:
    """Return how many pages or slots of each pool, with the heads of all ranks, make `nbytes` bytes; at least one."""
    return {pool: max(1, nbytes // spec.whole.unit_bytes(pool)) for pool in spec.by_name}


def finished(
    wanted: Mapping[str, range],
    allocation: Allocation,
    chain: Sequence[bytes],
    ends: Mapping[str, int],
    most: Mapping[str, int] | None = None,
) -> dict[str, SendablePages]:
    """Return, by pool, the next pages and slots of `wanted`, up to the first that isn't sealed; no entry for none.

    `chain` has the block hashes of all pages of the sequence, the last partly filled one included. `ends` has the
    digests at its end, by pool: of that last page, and of the recurrent state. `most` limits the pages or slots of each
    pool.
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
            table = allocation.tables.get(pool)
            places = table.pages[left.start :] if table is not None else allocation.slots[pool].indices
            out[pool] = SendablePages(left.start, tuple(places[: len(tags)]), tuple(tags))
    return out


def _sealed(allocation: Allocation, pool: str, number: int, ends: Mapping[str, int]) -> int | None:
    """Return the digest of a page or state by its number; None while it isn't finished."""
    whole = allocation.digests.get(pool, ())
    return whole[number] if number < len(whole) else ends.get(pool)
