"""Rows of holders by themselves: counted by the blocks that name them, shared by equal ones, and free once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from twinpool.router.kv_indexer.holder_sets import DEVICE, EMPTY, HolderSets, is_row, row_of

MANY = range(1, 6)
"""One more than fit into a value."""


def sets(rows: int = 4) -> HolderSets:
    return HolderSets(np.zeros((rows, 2, 8), np.uint8))


def held(sets: HolderSets, slots: Iterable[int]) -> int:
    value = EMPTY
    for slot in slots:
        value = sets.plus(value, slot, DEVICE)
    return value


def values(*of: int) -> NDArray[np.uint64]:
    return np.array(of, np.uint64)


def test_each_block_that_names_a_row_counts_also_of_several_at_once() -> None:
    rows = sets()
    value = held(rows, MANY)
    assert is_row(value)
    rows.count(values(EMPTY, EMPTY, EMPTY), values(value, value, value))
    assert rows.check(values(value, value, value)) == []
    rows.count(values(value, value), values(EMPTY, EMPTY))
    assert (rows.used, rows.check(values(value))) == (1, [])
    rows.count(values(value), values(EMPTY))
    assert rows.used == 0


def test_a_row_that_was_free_again_before_unused_ones_are_dropped_is_given_to_one_only() -> None:
    rows = sets()
    value = held(rows, MANY)
    rows.count(values(EMPTY), values(value))
    rows.count(values(value), values(EMPTY))
    rows.drop_unused()
    first, second = held(rows, range(11, 16)), held(rows, range(21, 26))
    assert row_of(first) != row_of(second)
    assert [sorted(rows.holders(one)) for one in (first, second)] == [[*range(11, 16)], [*range(21, 26)]]
    rows.drop_unused()
    assert rows.used == 0
    assert rows._made == [], "what was looked at once is not looked at again"


def test_of_rows_that_became_equal_the_one_that_is_left_is_found_when_the_other_is_free() -> None:
    rows = sets()
    gone, left = held(rows, (*MANY, 20)), held(rows, (*MANY, 21))
    rows.drop_unused()
    gone, left = held(rows, (*MANY, 20)), held(rows, (*MANY, 21))
    rows.count(values(EMPTY, EMPTY), values(gone, left))
    assert rows.clear_slots([20, 21]).tolist() == []
    known = held(rows, MANY)
    other = gone if known == left else left
    assert known in (gone, left)
    rows.count(values(other), values(EMPTY))
    assert held(rows, MANY) == known, "it is found by what it holds"
    assert rows.check(values(known)) == []
