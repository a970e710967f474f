"""Windows get their pages a step at a time, and use again what they have left: however long a request is, its share of
the window pool is the same."""

from __future__ import annotations

import pytest

from tests.cache.manager.parts import Parts
from tests.support.cache_harness import World
from tests.support.cache_requests import Visitor
from tests.support.pool_sets import pool_sets

PAGE_TOKENS = 2
SPEC = pool_sets(PAGE_TOKENS)["full+window"]
STRIDE = 2 * PAGE_TOKENS
HOLD = SPEC.window_hold("window", STRIDE)
LONG = [n % 3 for n in range(PAGE_TOKENS * 30)]


def world_of(window_pages: int, **options: object) -> World:
    counts = {"window": 1 + window_pages}
    return World(SPEC, 1, pages=70, host_pages=0, storage=False, stride=STRIDE, counts=counts, **options)  # type: ignore[arg-type]


def compute(world: World, visitor: Visitor) -> int:
    """Two steps of a page under way at a time, to its end; returns the most window pages that it held."""
    most = 0
    while visitor.done < len(visitor.prefix):
        while visitor.launched < min(visitor.done + 2, len(visitor.prefix)):
            assert world.compute(visitor, 1), "a page of its window is there for each step"
        assert visitor.allocation is not None
        most = max(most, visitor.allocation.own("window"))
        assert world.commit(visitor, share=False)
        world.manager.running.free_window_pages(visitor.allocation, visitor.done * PAGE_TOKENS)
        assert world.check() == []
    return most


def test_a_request_of_any_length_holds_no_more_of_a_window_pool_than_its_share() -> None:
    """Every byte that its steps read is checked as well."""
    world = world_of(HOLD)
    visitor = world.arrive(LONG)
    assert world.admit(visitor)
    assert compute(world, visitor) <= HOLD < len(visitor.prefix)
    assert visitor.allocation is not None
    seen = [page for page in visitor.allocation.tables["window"].pages if page]
    assert len(seen) <= HOLD
    world.leave(visitor)
    world.settle()


def test_pages_that_a_window_uses_again_come_under_new_epochs() -> None:
    world = world_of(HOLD)
    visitor = world.arrive(LONG)
    assert world.admit(visitor)
    allocation = visitor.allocation
    assert allocation is not None
    before = dict(zip(allocation.tables["window"].pages, allocation.tables["window"].epochs, strict=True))
    compute(world, visitor)
    now = [
        (i, e) for i, e in zip(allocation.tables["window"].pages, allocation.tables["window"].epochs, strict=True) if i
    ]
    assert {i for i, _ in now} <= before.keys(), "they are the same pages"
    assert all(epoch > before[index] for index, epoch in now), "who has an old table of them is stale"
    world.leave(visitor)
    world.settle()


def test_a_window_sets_pages_aside_for_what_is_to_come_and_within_its_share() -> None:
    """A request of eight pages, a page a step; whoever looks twice changes nothing."""
    parts = Parts("full+window")
    allocation, tokens, seen = parts.open(8), parts.pools.spec.page_tokens, list[tuple[int, int]]()
    for step in range(1, 9):
        assert parts.running.extend(allocation, step * tokens) == step * tokens
        for _ in range(2):
            parts.running.free_window_pages(allocation, step * tokens)
            spare = allocation.spare.get("window")
            seen.append((len(spare) if spare is not None else 0, allocation.own("window")))
    wanted = [(3, 4), (2, 4), (2, 4), (2, 4), (2, 4), (2, 4), (1, 3), (0, 2)]
    assert seen == [one for one in wanted for _ in range(2)], "spare pages, and all of its own"
    parts.allocations.free(allocation)


def test_where_no_page_of_a_window_pool_is_free_none_is_set_aside() -> None:
    parts = Parts("full+window")
    allocation, allocator = parts.open(8), parts.pools.allocators["window"]
    assert parts.running.extend(allocation, parts.pools.spec.page_tokens) == parts.pools.spec.page_tokens
    others = allocator.lease(allocator.free, "others")
    parts.running.free_window_pages(allocation, parts.pools.spec.page_tokens)
    assert allocation.own("window") == 1
    others.release()
    parts.allocations.free(allocation)


def test_a_window_waits_for_the_step_under_way_and_not_for_anybody_else() -> None:
    world = world_of(2 * HOLD)
    first, other = world.arrive(LONG), world.arrive([7, *LONG])
    assert world.admit(first)
    assert world.admit(other), "each has its own share"
    third = world.arrive([8, *LONG])
    assert not world.admit(third), "who can't have a share waits"
    for visitor in (first, other):
        compute(world, visitor)
        world.leave(visitor)
    assert world.admit(third)
    compute(world, third)
    world.leave(third)
    world.settle()


def who_has_shared_eight_pages() -> tuple[World, Visitor]:
    """A world, and a visitor whose pages are its tree's, too."""
    world = world_of(HOLD)
    visitor = world.arrive(LONG[: 2 * 8])
    assert world.admit(visitor)
    compute(world, visitor)
    assert visitor.allocation is not None
    world._share(visitor, visitor.allocation)
    return world, visitor


def test_a_request_alone_does_without_its_prefix_where_that_leaves_no_room_for_the_rest() -> None:
    world, visitor = who_has_shared_eight_pages()
    world.leave(visitor)
    tree = world.manager.tree
    longer = world.arrive(LONG)
    assert tree.match(longer.prefix).device_depth == 8, "the tree has a window for it"
    allocation = world.manager.allocations.allocate(longer.prefix, len(LONG), "longer", reusable=20)
    assert allocation is not None, "nobody else would ever give it room"
    assert allocation.depth == 0
    world.manager.allocations.free(allocation)
    world.visitors.remove(longer)
    world.settle()


def test_a_request_alone_keeps_its_prefix_and_waits_for_pages_that_are_still_being_sent() -> None:
    world, visitor = who_has_shared_eight_pages()
    allocator = world.manager.pools.allocators["full"]
    sent = allocator.lease(allocator.free, "a request that has left")
    pin = sent.pin("its send")
    world.leave(visitor)
    sent.release()
    longer = world.arrive(LONG)
    assert world.manager.allocations.allocate(longer.prefix, 2 * 9, "longer", reusable=8) is None
    assert world.manager.tree.match(longer.prefix).device_depth == 8, "what it is to go on from is still there"
    pin.release()
    allocation = world.manager.allocations.allocate(longer.prefix, 2 * 9, "longer", reusable=8)
    assert allocation is not None
    assert allocation.depth == 8
    world.manager.allocations.free(allocation)
    world.visitors.remove(longer)
    world.settle()


@pytest.mark.parametrize(("window_pages", "most"), [(HOLD, 69), (HOLD - 1, HOLD - 1)])
def test_what_can_never_be_held_is_said_beforehand(window_pages: int, most: int) -> None:
    assert world_of(window_pages).manager.supply.max_positions == most * PAGE_TOKENS


def test_a_request_that_asks_for_all_of_its_length_at_once_gets_its_share_of_a_window_pool_and_no_more() -> None:
    """However many pages are free: others need them as well."""
    world = world_of(4 * HOLD)
    visitor = world.arrive(LONG)
    assert world.admit(visitor)
    allocation = visitor.allocation
    assert allocation is not None
    reached = world.manager.running.extend(allocation, len(LONG))
    assert allocation.own("window") <= HOLD
    assert reached < len(LONG), "the window has to move on before the next positions"
    assert world.manager.running.extend(allocation, len(LONG)) == reached
    world.leave(visitor)
    world.settle()
