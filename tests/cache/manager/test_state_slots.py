"""State slots by themselves: what is copied aside, and when a slot that is given back is free."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.manager.parts import PAGE_TOKENS, PAGES, Parts
from tests.support.room_ends import LateDevice
from twinpool.cache.allocation import StateSnapshot
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, DeviceOp, DeviceStream, PageSpanUse
from twinpool.cache.manager.allocations import Allocations
from twinpool.cache.manager.running_pages import SNAPSHOTS
from twinpool.cache.manager.tier_set import NoPrefetcher
from twinpool.cache.prefix_cache.tree_node import PageOffer
from twinpool.contracts.errors import UnorderedAccess


def test_the_slot_of_an_oldest_snapshot_is_leased_to_nobody_while_it_is_being_copied() -> None:
    parts, late = Parts(), LateDevice()
    device: Any = late
    slots = parts.running_on(device)
    allocation = parts.open()
    for number in range(1, SNAPSHOTS + 2):
        assert slots.snapshot(allocation, number * PAGE_TOKENS)
    held = allocation.snapshots["state"]
    assert [snapshot.depth for snapshot in held] == [2, 3], "the oldest made room"
    assert parts.free()["state"] == PAGES - 1 - SNAPSHOTS - 1, "its copy may still write to it"
    late.run_all()
    parts.in_flight.sweep()
    assert parts.free()["state"] == PAGES - 1 - SNAPSHOTS
    parts.allocations.free(allocation)
    assert set(parts.free().values()) == {PAGES}


def test_a_snapshot_is_leased_to_nobody_while_it_is_copied_for_a_request_that_has_gone() -> None:
    """Neither of the two slots: the tree's may be evicted as soon as the request has given its lock back."""
    parts, late = Parts("full+state"), LateDevice()
    device: Any = late
    loads: Any = parts.loads
    allocations = Allocations(device, parts.supply, parts.planner, loads, NoPrefetcher(), parts.in_flight)
    leases = {pool: parts.pools.allocators[pool].lease(1, "whoever computed it") for pool in ("full", "state")}
    offers = {pool: [PageOffer(pool == "state", lease, (7,))] for pool, lease in leases.items()}
    parts.tree.insert(parts.prefix(1), offers)
    allocation = allocations.allocate(parts.prefix(1), PAGE_TOKENS + 1, "a request", reusable=1)
    assert allocation is not None
    assert allocation.depth == 1
    allocations.launch()
    allocations.free(allocation)
    parts.tree.eviction.clear()
    assert parts.free()["state"] == PAGES - 2
    late.run_all()
    parts.in_flight.sweep()
    assert parts.free()["state"] == PAGES


def test_a_state_is_sealed_only_when_the_host_knows_that_nothing_writes_it_any_more() -> None:
    parts, device = Parts(), AdversarialDevice(2, polled=0.0)
    sealer, allocation = parts.finished_on(device), parts.open()
    writes = (PageSpanUse(DEVICE, "state", allocation.slots["state"].indices),)
    step = device.submit(DeviceOp("a step", DeviceStream.COMPUTE, writes=writes), lambda: None)
    with pytest.raises(UnorderedAccess, match="seal state"):
        sealer.end_digests(allocation, PAGE_TOKENS)
    step.wait()
    assert sealer.end_digests(allocation, PAGE_TOKENS).keys() == {"state"}
    parts.allocations.free(allocation)


class Copied:
    """The completion of a snapshot's copy."""

    def __init__(self, done: bool, error: RuntimeError | None = None) -> None:
        self.done, self._error = done, error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    order = wait


def test_only_snapshots_whose_copy_came_to_a_good_end_are_given_to_the_tree() -> None:
    parts = Parts("full+state")
    sharing = parts.finished_on(parts.device)
    allocation = parts.open()
    copies = [Copied(True), Copied(True, RuntimeError("an illegal address was touched")), Copied(False), Copied(True)]
    held = [
        StateSnapshot(depth, parts.pools.allocators["state"].lease(1, "a snapshot"), copied)
        for depth, copied in enumerate(copies, 1)
    ]
    allocation.snapshots = {"state": held}
    offers = sharing._snapshot_offers(allocation, "state", 3)
    assert [(offer.first, offer.lease) for offer in offers] == [(1, held[0].lease)], "and none behind what is sealed"
    copies[2].done = True
    assert [offer.first for offer in sharing._snapshot_offers(allocation, "state", 4)] == [1, 3, 4]
