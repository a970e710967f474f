"""State of requests that are off the device, by the manager's parts: on the host, on storage and back, page by page."""

from __future__ import annotations

import pytest

from tests.cache.test_hazards_tiers import PAGE_TOKENS, PAGES, TOKENS, admitted, answer, visit, world_of
from tests.support.cache_harness import World
from twinpool.cache.allocation import Allocation
from twinpool.cache.manager import swapped_requests
from twinpool.cache.prefix_cache.tree_node import Tier, TokenPrefix
from twinpool.cache.storage.storage_backend import ObjectName
from twinpool.cache.swap import swap_storage
from twinpool.cache.swap.swap_storage import SwappedState, SwapPlace
from twinpool.contracts.errors import CapacityError, StaleLease

SHARED = 2
"""Leading pages that the tree has on the host too."""


def computed(world: World) -> tuple[Allocation, TokenPrefix]:
    """A request whose first pages were shared by another one has computed the rest, and keeps that to itself."""
    visit(world, TOKENS[: SHARED * PAGE_TOKENS])
    visitor = admitted(world, TOKENS)
    while visitor.done < PAGES:
        assert world.compute(visitor, PAGES)
        answer(world)
        assert world.commit(visitor, share=False)
    assert visitor.allocation is not None
    return visitor.allocation, visitor.prefix


def swapped_out(world: World, allocation: Allocation, prefix: TokenPrefix) -> SwappedState:
    world.disturbed = True
    swapped = world.manager.swapped.swap_out(allocation, prefix, len(TOKENS))
    (visitor,) = world.visitors
    world.leave(visitor)
    answer(world)
    world.manager.swapped.settle(swapped)
    return swapped


@pytest.mark.parametrize("page", range(SHARED, PAGES))
@pytest.mark.parametrize("pool", ["full", "window"])
def test_a9_a_page_that_was_damaged_since_it_was_sealed_makes_the_copy_of_its_request_useless(
    pool: str, page: int
) -> None:
    """Whichever pool it is of: the copy's own digests are those of the damaged bytes."""
    world = world_of("all")
    allocation, prefix = computed(world)
    buffer = world.pools.layout.buffers[pool][0]
    world.pools.region[buffer.offset(0, allocation.tables[pool].pages[page])] ^= 1
    swapped = swapped_out(world, allocation, prefix)
    assert (swapped.place, swapped.damage) == (SwapPlace.LOST, {pool: [page]})
    world.manager.swapped.drop(swapped)
    world.settle()


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("page", range(SHARED, PAGES))
@pytest.mark.parametrize("pool", ["full", "window"])
def test_a9_damage_on_storage_is_told_by_the_pages_number_in_its_request(
    monkeypatch: pytest.MonkeyPatch, pool: str, page: int, batch: int
) -> None:
    """Its first pages are the tree's, and pages go in several operations: its place among those is another number."""
    monkeypatch.setattr(swap_storage, "_BATCH_PAGES", batch)
    world = world_of("all")
    swapped = swapped_out(world, *computed(world))
    assert (swapped.place, swapped.kept) == (SwapPlace.HOST, SHARED)
    assert world.manager.swapped.to_storage(swapped, TOKENS)
    answer(world)
    assert swapped.place is SwapPlace.STORED
    objects, key = world.backend.store.objects, ObjectName("model", pool, swapped.prefix.key(page)).key
    objects[key] = bytes([objects[key][0] ^ 1]) + objects[key][1:]
    world.manager.swapped.from_storage(swapped, TOKENS)
    answer(world)
    assert (swapped.place, swapped.damage) == (SwapPlace.LOST, {pool: [page]})
    world.manager.swapped.drop(swapped)
    world.settle()


def test_a_state_of_which_storage_has_lost_a_page_keeps_no_host_memory() -> None:
    """No byte was damaged: nobody is to look at it, and its request is computed again."""
    world = world_of("all")
    swapped = swapped_out(world, *computed(world))
    assert world.manager.swapped.to_storage(swapped, TOKENS)
    answer(world)
    world.backend.store.pop(ObjectName("model", "full", swapped.prefix.key(SHARED)).key)
    world.manager.swapped.from_storage(swapped, TOKENS)
    answer(world)
    assert (swapped.place, swapped.damage, swapped.leases) == (SwapPlace.LOST, {}, 0)
    world.manager.swapped.drop(swapped)
    world.settle()


def test_room_for_a_copy_is_not_made_of_the_pages_that_are_left_to_the_tree() -> None:
    world = world_of("full", host_pages=SHARED + 2)
    allocation, prefix = computed(world)
    with pytest.raises(CapacityError):
        world.manager.swapped.swap_out(allocation, prefix, len(TOKENS))
    assert world.manager.tree.accounts.sizes[Tier.HOST, "full"] == SHARED
    (visitor,) = world.visitors
    world.leave(visitor)
    answer(world)
    world.settle()


@pytest.mark.parametrize("refused", [RuntimeError("the device refuses"), CapacityError("no host memory")])
def test_a_copy_that_cannot_begin_takes_nothing_and_locks_nothing(
    monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    """Its first pages are the tree's, and were locked on the host before the copy was tried."""
    world = world_of("all")
    allocation, prefix = computed(world)

    def refuse(*_: object, **__: object) -> None:
        raise refused

    monkeypatch.setattr(swapped_requests, "offload", refuse)
    assert world.host is not None
    allocators = world.host.allocators
    before = len(world.manager.tree.locks), {pool: one.free for pool, one in allocators.items()}
    with pytest.raises(type(refused), match=str(refused)):
        world.manager.swapped.swap_out(allocation, prefix, len(TOKENS))
    assert (len(world.manager.tree.locks), {pool: one.free for pool, one in allocators.items()}) == before
    assert len(world.manager.swapped) == 0
    (visitor,) = world.visitors
    world.leave(visitor)
    answer(world)
    world.settle()


@pytest.mark.parametrize("refused", [RuntimeError("the device refuses"), StaleLease("a page was given away")])
def test_a_state_that_cannot_be_brought_back_now_takes_no_pages(
    monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    world = world_of("all")
    swapped = swapped_out(world, *computed(world))
    allocators = world.pools.allocators
    before = len(world.manager.tree.locks), {pool: one.free for pool, one in allocators.items()}

    def refuse(*_: object, **__: object) -> None:
        raise refused

    monkeypatch.setattr(swapped_requests, "restore", refuse)
    with pytest.raises(type(refused), match=str(refused)):
        world.manager.swapped.swap_in(swapped, len(TOKENS) + 1)
    answer(world)
    assert (len(world.manager.tree.locks), {pool: one.free for pool, one in allocators.items()}) == before
    monkeypatch.undo()
    coming = world.manager.swapped.swap_in(swapped, len(TOKENS) + 1)
    assert coming is not None
    answer(world)
    world.manager.allocations.free(coming.allocation)
    world.manager.swapped.drop(swapped)
    world.settle()


def test_a_state_whose_leading_pages_the_tree_has_lost_is_not_brought_back_without_them() -> None:
    """They were not copied, since the tree kept them on the host; then they were found damaged."""
    world = world_of("all")
    swapped = swapped_out(world, *computed(world))
    assert swapped.kept == SHARED
    before = {pool: one.free for pool, one in world.pools.allocators.items()}
    world.manager.tree.invalidate(swapped.prefix, SHARED - 1)
    answer(world)
    with pytest.raises(StaleLease, match="pages that the tree kept for it were invalidated"):
        world.manager.swapped.swap_in(swapped, len(TOKENS) + 1)
    assert all(one.free >= before[pool] for pool, one in world.pools.allocators.items()), "nothing was taken"
    world.manager.swapped.drop(swapped)
    world.settle()


def test_what_the_tree_has_got_of_a_state_meanwhile_is_not_copied_to_the_device_again() -> None:
    """Another request has computed the same pages, to the same bits."""
    world = world_of("full")
    swapped = swapped_out(world, *computed(world))
    assert swapped.kept == SHARED
    visit(world, TOKENS)
    coming = world.manager.swapped.swap_in(swapped, len(TOKENS) + 1)
    assert coming is not None
    assert coming.allocation.depth == PAGES
    answer(world)
    world.manager.allocations.free(coming.allocation)
    world.manager.swapped.drop(swapped)
    world.settle()


def test_a_worker_is_busy_as_long_as_storage_writes_or_reads_for_a_request_that_is_away() -> None:
    """Who is busy looks again soon; who isn't would leave it where it is."""
    world = world_of("all")
    swapped = swapped_out(world, *computed(world))
    manager, queue = world.manager, world.queue
    assert queue is not None
    assert not manager.busy
    for begin, on_the_way, there in (
        (manager.swapped.to_storage, SwapPlace.STORING, SwapPlace.STORED),
        (manager.swapped.from_storage, SwapPlace.FETCHING, SwapPlace.HOST),
    ):
        begin(swapped, TOKENS)
        while queue.run_next():
            assert (manager.busy, swapped.place) == (True, on_the_way)
        assert manager.busy, "nobody has taken in what storage said"
        manager.poll()
        assert (manager.busy, swapped.place) == (False, there)
    manager.swapped.drop(swapped)
    world.settle()
