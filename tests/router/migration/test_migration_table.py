"""A draining worker's wish: whoever could not take a request is left alone, for longer each time."""

from __future__ import annotations

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.router.migration.migration_table import AVOID_S, DOUBLINGS, DrainWish

SOURCE = WorkerName("decode-0"), Incarnation(1)
TARGET = WorkerName("decode-1"), Incarnation(1)
OTHER = WorkerName("decode-2"), Incarnation(1)


def test_a_target_that_refused_is_avoided_for_twice_as_long_with_each_try() -> None:
    wish = DrainWish(SOURCE, started=True)
    for doubling in range(DOUBLINGS + 3):
        now = 100.0 * doubling
        wish.refused(TARGET, now)
        assert wish.avoid == {TARGET: now + AVOID_S * 2 ** min(doubling, DOUBLINGS)}


def test_tries_count_whichever_target_refused() -> None:
    wish = DrainWish(SOURCE, started=True)
    wish.refused(TARGET, 0.0)
    wish.refused(OTHER, 10.0)
    assert wish.avoid == {TARGET: AVOID_S, OTHER: 10.0 + 2 * AVOID_S}
