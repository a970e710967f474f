"""The table of allocations: what is in it, and the one way out of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.manager.parts import PAGES, Operation, Parts
from twinpool.contracts.errors import CapacityError


def test_an_allocation_is_freed_once_and_gives_back_everything(parts: Parts) -> None:
    allocation = parts.open()
    assert list(parts.allocations) == [allocation]
    assert (parts.allocations.own("full"), parts.allocations.own("state")) == (2, 1)
    parts.allocations.free(allocation)
    parts.allocations.free(allocation)
    assert allocation.released
    assert len(parts.allocations) == len(parts.tree.locks) == 0
    assert set(parts.free().values()) == {PAGES}


def test_pages_that_an_operation_names_are_free_when_it_is_complete_and_not_before(parts: Parts) -> None:
    operation: Any = Operation()
    parts.allocations.free(parts.open(), [operation])
    assert parts.free()["full"] == PAGES - 2
    parts.in_flight.sweep()
    assert parts.free()["full"] == PAGES - 2
    operation.done = True
    parts.in_flight.sweep()
    assert set(parts.free().values()) == {PAGES}


def test_a_state_slot_is_leased_to_nobody_while_the_operation_that_fills_it_is_under_way(parts: Parts) -> None:
    allocation, operation = parts.open(), Operation()
    filling: Any = operation
    allocation.started.append(filling)
    (slot,) = allocation.slots["state"].indices
    parts.allocations.free(allocation)
    parts.in_flight.sweep()
    slots = parts.pools.allocators["state"]
    assert slots.free == PAGES - 1
    others = slots.lease(PAGES - 1, "others")
    assert slot not in others.indices
    with pytest.raises(CapacityError):
        slots.lease(1, "one more")
    operation.done = True
    parts.in_flight.sweep()
    assert slots.lease(1, "one more").indices == (slot,)


def test_only_those_that_were_not_freed_are_launched_and_each_once(parts: Parts) -> None:
    first, second = parts.open(), parts.open()
    for allocation in (first, second):
        parts.allocations.open(allocation, fresh=True)
    parts.allocations.free(first)
    assert not parts.allocations.ready(second), "its slot isn't filled yet"
    for _ in range(2):
        parts.allocations.launch()
        assert (len(first.started), len(second.started)) == (0, 1)
    assert parts.allocations.ready(second)


def test_who_relied_on_damage_is_told_of_once_and_in_order(parts: Parts) -> None:
    failed, relied, other = parts.open(), parts.open(), parts.open()
    broken: Any = Operation(done=True, error=RuntimeError("it broke"))
    failed.started.append(broken)
    stranger = parts.tree.locks.keep((), "a copy")
    locks = [relied.lock, stranger, failed.lock, relied.lock]
    assert parts.allocations.invalidate(locks) == [failed, relied]
    assert failed.invalid
    assert relied.invalid
    assert not other.invalid
    assert parts.allocations.invalidate(locks) == parts.allocations.invalidate([]) == []


def test_what_was_found_is_counted_when_an_allocation_is_opened(parts: Parts) -> None:
    parts.open()
    parts.open()
    assert parts.allocations.counters == {"hit_tokens_device": 8, "hit_tokens_host": 6, "hit_tokens_storage": 4}


def test_check_names_strangers_and_old_epochs_in_a_table(parts: Parts) -> None:
    allocation = parts.open()
    allocation.tables["full"].epochs[0] += 1
    strangers, old = parts.allocations.check()
    assert strangers == "a request: full pages [1, 2] of its table are neither its own nor locked"
    assert old == "a request: its full table has old epochs"
