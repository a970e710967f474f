"""Required pages: the page and slot numbers that a sequence needs of each pool to go on from a position.

State is numbered along the sequence: page n holds positions n * page_tokens up to the next page, in full and window
pools alike. A state slot that is the state after all positions has the number of the last page, whose block hash it
shares. For a prompt of 27 positions, pages of 4 and a window of 9 (the query's own position and 8 before it):

    page       |  0 |  1 |  2 |  3 |  4 |  5 | 6 .|       the 28th position is computed next
    full       [==================================)       range(0, 7)   every page, the last one partly filled
    window      . . . . . . . . . . [=============)       range(4, 7)   pages with one of positions 19 .. 26
    state       . . . . . . . . . . . . . . . . [=)       range(6, 7)   one slot, after position 26

At zero positions nothing is due, and of a window of one position nothing ever is: it reaches back to no page. *Missing*
pages are due and not held: subtracted pool by pool, as each pool is lost and found on its own (hazard A12).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec, PoolSpec

HeldPages = Mapping[str, Collection[int]]
"""By pool: the numbers of pages and slots that the sequence already has in place and keeps."""
NOTHING: HeldPages = {}


def due(spec: PoolSetSpec, positions: int) -> dict[str, range]:
    """The page (or slot) numbers due in each pool after `positions` positions, for the next one to be computed."""
    return {pool.name: _due(pool, positions, spec.page_tokens) for pool in spec.pools}


def missing(wanted: Mapping[str, range], held: HeldPages) -> dict[str, range]:
    """By pool, the range from the first to the last number of `wanted` that isn't held, held ones between included."""
    out = {}
    for pool, numbers in wanted.items():
        there = held.get(pool, ())
        if isinstance(there, range) and there.step == 1 and numbers.start in there:
            # The held range covers the start without a gap, as in the full pool: no need to look at each number.
            out[pool] = range(min(there.stop, numbers.stop), numbers.stop)
            continue
        lacking = set(numbers).difference(there)
        out[pool] = range(min(lacking), max(lacking) + 1) if lacking else range(numbers.stop, numbers.stop)
    return out


def extents(spec: PoolSetSpec, pool: str, numbers: range, positions: int) -> tuple[list[int], list[int]]:
    """First positions and ends of pages `numbers` of a sequence of `positions`, as `PageDigester.digest` takes them.

    A state slot counts as the one position that comes after its state.
    """
    if spec.by_name[pool].kind is PoolKind.STATE:
        return [positions] * len(numbers), [positions + 1] * len(numbers)
    firsts = [n * spec.page_tokens for n in numbers]
    return firsts, [min(first + spec.page_tokens, positions) for first in firsts]


def _due(pool: PoolSpec, positions: int, page_tokens: int) -> range:
    pages = -(-positions // page_tokens)
    if pool.kind is PoolKind.FULL:
        return range(pages)
    if pool.kind is PoolKind.STATE:
        return range(max(0, pages - 1), pages)
    first = max(0, positions - (pool.window_tokens - 1))
    return range(first // page_tokens if first < positions else pages, pages)
