"""Hazards of the tree and its tiers, a test each: all is real but the device's lateness."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cache_harness import World
from tests.support.cache_requests import Visitor
from tests.support.pool_sets import NAMES, pool_sets
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import Lease, PageAllocator
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NO_LOCKS, PageOffer, Tier, TokenPrefix
from twinpool.cache.storage.io_queue import StorageOp

PAGE_TOKENS = 2
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
PAGES = 4


def world_of(name: str, seed: int = 1, **settings: Any) -> World:
    return World(pool_sets(PAGE_TOKENS)[name], seed, **{"pages": 40, "host_pages": 40, **settings})


def answer(world: World, rounds: int = 30) -> None:
    """Whatever is under way comes to its end."""
    for _ in range(rounds):
        if world.queue is not None:
            world.queue.run_all(world.rng)
        if world.adversarial is not None:
            world.adversarial.settle()
        world.clock.advance(0.01)
        world.poll()


def admitted(world: World, tokens: list[int]) -> Visitor:
    visitor = world.arrive(tokens)
    answer(world)
    assert world.admit(visitor)
    return visitor


def compute_all(world: World, visitor: Visitor, *, pages: int = PAGES, snapshot: bool = True) -> None:
    while visitor.done < len(visitor.prefix):
        assert world.compute(visitor, pages, snapshot=snapshot)
        answer(world)
        assert visitor in world.visitors, "what it relied on was damaged"
        assert world.commit(visitor, share=False)
        answer(world)
        world._share(visitor, visitor.allocation)  # type: ignore[arg-type]
        answer(world)


def visit(world: World, tokens: list[int], *, pages: int = PAGES, snapshot: bool = True) -> int:
    """A request comes, computes what it doesn't find, shares it and leaves; returns how many pages it found."""
    visitor = admitted(world, tokens)
    found = visitor.done
    compute_all(world, visitor, pages=pages, snapshot=snapshot)
    world.leave(visitor)
    answer(world)
    return found


def forget(world: World, *tiers: Tier) -> None:
    for tier in tiers:
        for pool in world.spec.by_name:
            world.evict(tier, pool, 1 << 30)


# ------------------------------------------------------------ reads before ready, writes after free


@pytest.mark.slow
def test_a8_a_slot_is_cleared_copied_and_written_in_the_order_of_one_stream() -> None:
    for seed in range(15):
        world = world_of("full+state", seed, adversarial=True)
        first = admitted(world, TOKENS)
        for _ in range(PAGES):
            world.compute(first, 1, snapshot=True)
            while len(first.steps) > 1:
                world.commit(first, share=True)
        while first.steps:
            world.commit(first, share=True)
        second = world.arrive([*TOKENS, 9, 9, 8, 8])
        while not world.admit(second):
            answer(world, 1)
        world.compute(second, 1, snapshot=True)
        world.compute(second, 1, snapshot=True)
        while second.steps:
            world.commit(second, share=True)
        world.settle()


def test_a9_an_allocation_that_was_not_launched_is_not_ready() -> None:
    world = world_of("full+state", adversarial=True)
    visit(world, TOKENS)
    visitor = admitted(world, [*TOKENS, 9, 9])
    assert visitor.allocation is not None
    assert not world.manager.allocations.ready(visitor.allocation), "its slot holds another's state still"
    world.manager.launch()
    answer(world)
    assert world.manager.allocations.ready(visitor.allocation)
    world.settle()


def test_a9_of_several_damaged_pages_in_one_load_none_is_matched_again() -> None:
    """Requests of different prefixes come in the same round: their loads are one copy."""
    world = world_of("full", storage=False)
    prompts = [[first] * 8 for first in (1, 2, 3)]
    for tokens in prompts:
        visit(world, tokens)
    forget(world, Tier.DEVICE)
    world.damaged = world.disturbed = True
    assert world.host is not None
    for node in world.manager.tree.accounts.nodes():
        page = world.host.layout.page(world.host.region, "full", node.parts[Tier.HOST]["full"].lease.indices[0])
        if node.raw[0] != 2:
            page[0] ^= 1
    visitors = [world.arrive(tokens) for tokens in prompts]
    for visitor in visitors:
        visitor.reusable = PAGES
        assert world.admit(visitor)
        assert visitor.done == PAGES
    world.manager.launch()
    answer(world)
    assert world.visitors == [visitors[1]], "those that relied on damaged pages have left"
    assert [world.manager.tree.match(TokenPrefix.of(tokens, PAGE_TOKENS)).depth for tokens in prompts] == [0, PAGES, 0]
    assert world.manager.stats()["pages_damaged_on_host"] == 2 * PAGES
    world.settle()


def test_the_bytes_and_the_speed_of_a_load_are_those_of_all_its_pools() -> None:
    world = world_of("all", adversarial=True)
    visit(world, TOKENS)
    forget(world, Tier.DEVICE)
    load_back = world.manager.tiers.load_back
    visitor = world.arrive(TOKENS)
    visitor.reusable = PAGES
    answer(world)
    assert world.admit(visitor)
    assert visitor.done == PAGES
    unit_bytes = world.spec.unit_bytes
    nbytes = PAGES * unit_bytes("full") + 4 * unit_bytes("window") + unit_bytes("state")
    assert load_back.nbytes == nbytes, "it is planned: a window reaches over eight positions, four pages"
    began = world.clock.now()
    world.manager.launch()
    assert load_back.nbytes == nbytes
    assert world.adversarial is not None
    world.adversarial.settle()
    world.clock.advance(4.0)
    world.poll()
    assert load_back.nbytes == 0
    assert load_back.bytes_per_s == pytest.approx(nbytes / (world.clock.now() - began))
    world.settle()


@pytest.mark.parametrize("use", ["taken over", "pushed"])
@pytest.mark.parametrize("name", ["full", "full+window"])
def test_a9_what_relies_on_a_load_that_is_planned_and_not_begun_is_not_ready(name: str, use: str) -> None:
    """No slot of its own is to be filled at `launch`, so the plan alone says that the bytes aren't there."""
    world = world_of(name, adversarial=True)
    visit(world, TOKENS)
    forget(world, Tier.DEVICE)
    manager, leases = world.manager, dict[str, Lease]()
    prefix = TokenPrefix.of([*TOKENS, 9, 9], PAGE_TOKENS)
    if use == "taken over":
        reserved = manager.allocations.preallocate(
            prefix, 2 * len(prefix), 2 * len(prefix), "a prompt computed elsewhere"
        )
        assert reserved is not None
        allocation, leases = reserved
    else:
        admitted(world, [*TOKENS, 9, 9])
        allocation = manager.allocations.hold_for_push(prefix, "a push to another worker")
    assert allocation.depth == PAGES
    assert not manager.allocations.ready(allocation)
    answer(world)
    assert not manager.allocations.ready(allocation), "time begins no load"
    manager.launch()
    assert not manager.allocations.ready(allocation), "it is under way"
    answer(world)
    assert manager.allocations.ready(allocation)
    for lease in leases.values():
        lease.release()
    manager.allocations.free(allocation)
    world.settle()


@pytest.mark.parametrize("name", NAMES)
def test_a9_a_load_whose_bytes_are_damaged_is_no_hit_whichever_pool_it_is(name: str) -> None:
    for pool in pool_sets()[name].by_name:
        world = world_of(name)
        visit(world, TOKENS)
        forget(world, Tier.DEVICE)
        assert world.host is not None
        part = next(n for n in world.manager.tree.accounts.nodes()).parts[Tier.HOST][pool]
        world.host.layout.page(world.host.region, pool, part.lease.indices[-1])[3] ^= 4
        world.damaged = world.disturbed = True
        visitor = admitted(world, [*TOKENS, 9, 9])
        assert visitor.done == PAGES, "it isn't known yet"
        world.compute(visitor, 1)
        answer(world, 2)
        assert visitor not in world.visitors, "it is told before anything of it is committed"
        assert world.manager.finished.counters["pages_invalidated"] == 0
        assert world.manager.tree.match(visitor.prefix).depth == 0, "what is damaged is never found again"
        world.settle()


def test_digests_of_a_load_are_an_operation_of_the_device_and_read_when_it_is_over() -> None:
    world = world_of("full+state", adversarial=True)
    visit(world, TOKENS)
    forget(world, Tier.DEVICE)
    assert world.adversarial is not None
    device, pools = world.adversarial, world.manager.pools
    begin, begun, read = pools.digesting, list[str](), list[str]()

    def digesting(pool: str, *where: Any) -> Callable[[], list[int]]:
        there = begin(pool, *where)
        begun.append(pool)

        def digests() -> list[int]:
            assert "load digests" in device.trace
            read.append(pool)
            return there()

        return digests

    def waits(*where: Any) -> list[int]:
        raise AssertionError("whoever asks for the digests of a load at once waits for it")

    pools.digesting, pools.digest = digesting, waits  # type: ignore[method-assign, assignment]
    visitor = admitted(world, [*TOKENS, 9, 9])
    assert not read, "nothing has been loaded yet"
    world.manager.launch()
    answer(world)
    assert sorted(begun) == sorted(read) == ["full", "state"]
    assert visitor.allocation is not None
    assert world.manager.allocations.ready(visitor.allocation)
    world.settle()


def test_a9_a_load_that_fails_halfway_is_no_hit() -> None:
    world = world_of("all")
    visit(world, TOKENS)
    forget(world, Tier.DEVICE)
    device: Any = world.device
    visitor = admitted(world, [*TOKENS, 9, 9])
    device._rate, device._rng = 1.0, random.Random(5)
    world.manager.launch()
    device._rate = 0.0
    answer(world, 2)
    assert world.manager.tiers.load_back.counters["loads_failed"] == 1
    assert visitor not in world.visitors
    assert world.manager.tree.match(visitor.prefix).depth == 0
    assert visit(world, [*TOKENS, 9, 9]) == PAGES, "storage still has it, and that is good"
    world.settle()


@pytest.mark.parametrize("name", NAMES)
def test_a9_what_storage_gave_only_in_part_is_a_shorter_hit_and_never_a_wrong_one(name: str) -> None:
    for lost in range(PAGES):
        for pool in pool_sets()[name].by_name:
            world = world_of(name)
            visit(world, TOKENS, pages=1)
            forget(world, Tier.DEVICE, Tier.HOST)
            assert world.queue is not None
            key = TokenPrefix.of(TOKENS, PAGE_TOKENS).key(lost)

            def fault(op: StorageOp, asked: Any) -> str | None:
                hit = op is StorageOp.READ and asked.chain == key and asked.pool == pool  # noqa: B023
                return "the disk failed" if hit else None

            world.queue.fault, world.disturbed = fault, True
            found = visit(world, [*TOKENS, 9, 9])
            assert found < PAGES or pool != world.manager.full
            assert found <= PAGES
            world.settle()


# ------------------------------------------------------------ ownership and accounting


STAGES = ("arrived", "prefetching", "admitted", "loading", "launched", "ahead", "committed", "shared", "sending")


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("stage", STAGES)
def test_b2_whoever_leaves_at_any_stage_leaves_nothing_behind(stage: str) -> None:
    for seed in range(4):
        world = world_of("all", seed, adversarial=True)
        visit(world, TOKENS)
        forget(world, *((Tier.DEVICE, Tier.HOST) if stage == "prefetching" else (Tier.DEVICE,)))
        visitor = world.arrive([*TOKENS, 9, 9, 8, 8])
        reach(world, visitor, stage, 1 + seed % 3)
        world.leave(visitor)
        world.settle()


def reach(world: World, visitor: Visitor, stage: str, tickets: int) -> None:
    """Take a request up to `stage`, with what it needs for that under way; storage has answered `tickets` times."""
    if stage in ("arrived", "prefetching"):
        for _ in range(tickets if stage == "prefetching" else 0):
            assert world.queue is not None
            assert world.queue.run_next()
            world.poll()
        return
    answer(world)
    assert world.admit(visitor)
    if stage == "loading":
        world.manager.launch()
    if stage in ("admitted", "loading"):
        return
    world.compute(visitor, 1, snapshot=True)
    if stage == "ahead":
        world.compute(visitor, 1, snapshot=True)
    if stage == "sending":
        world.send(visitor)
    if stage in ("committed", "shared"):
        while visitor.steps:
            world.commit(visitor, share=stage == "shared", snapshot=True)


def planted(tree: RadixTree, pages: PageAllocator, tokens: list[int], salt: str = "") -> None:
    """Insert `tokens` from a lease of its own, as a request would, and leave."""
    prefix = TokenPrefix.of(tokens, PAGE_TOKENS, salt)
    lease = pages.lease(len(prefix), "a request")
    digests = [int.from_bytes(prefix.key(page)[:8]) for page in range(len(prefix))]
    tree.insert(prefix, {"full": [PageOffer(0, lease, digests)]})
    lease.release()


def plain_tree(tokens: list[int] = TOKENS) -> tuple[RadixTree, PageAllocator]:
    tree, pages = RadixTree(pool_sets(PAGE_TOKENS)["full"]), PageAllocator("pages", 60, first=1)
    planted(tree, pages, tokens)
    return tree, pages


def test_b3_nodes_own_their_pages_and_hold_nothing_else() -> None:
    tree, pages = plain_tree(list(range(40)))
    (node,) = tree.accounts.nodes()
    indices = node.parts[Tier.DEVICE]["full"].lease.indices
    assert isinstance(indices, tuple), "nobody can edit it, and it is no view of anything"
    assert pages.total - pages.free == len(indices) == 20
    for count in (1, 7, 30):
        pages.lease(count, "another").release()
    assert node.parts[Tier.DEVICE]["full"].lease.indices == indices
    tree.lock(tree.match(TokenPrefix.of(list(range(10)), PAGE_TOKENS)), "short")
    parts = [n.parts[Tier.DEVICE]["full"] for n in tree.accounts.nodes()]
    assert sorted(len(p.lease.indices) for p in parts) == [5, 15], "each has what is its own"
    assert sorted(i for p in parts for i in p.lease.indices) == sorted(indices)
    assert pages.total - pages.free == 20
    assert tree.check() + pages.check() == []


def test_b4_a_token_gives_back_exactly_what_it_locked_also_after_splits() -> None:
    tree, pages = plain_tree()
    long = tree.lock(tree.match(TokenPrefix.of(TOKENS, PAGE_TOKENS)), "long")
    short = tree.lock(tree.match(TokenPrefix.of([*TOKENS[:4], 9, 9], PAGE_TOKENS)), "short")
    planted(tree, pages, [*TOKENS[:2], 7, 7])
    assert tree.check() == []
    assert tree.eviction.evict(Tier.DEVICE, "full", 100) == 1, "only what nobody locks"
    tree.locks.unlock(long)
    assert tree.check() == []
    assert tree.eviction.evict(Tier.DEVICE, "full", 100) == 2, "the upper half is still locked by the other"
    tree.locks.unlock(long)
    tree.locks.unlock(short)
    assert tree.eviction.evict(Tier.DEVICE, "full", 100) == 2
    assert pages.free == pages.total
    assert tree.check() == []


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("name", ["full+state", "all"])
def test_b5_a_match_a_lock_and_a_load_start_at_the_one_node_that_every_component_accepts(name: str, tier: Tier) -> None:
    world = world_of(name)
    visit(world, TOKENS[:4], snapshot=True)
    visit(world, TOKENS, snapshot=False)
    forget(world, *([Tier.DEVICE] if tier is Tier.HOST else []))
    prefix = TokenPrefix.of(TOKENS, PAGE_TOKENS)
    walked = sum(pages for _, pages in world.manager.tree.walked(prefix))
    assert walked == PAGES, "full state goes deeper than any snapshot"
    match = world.manager.tree.match(prefix)
    assert (match.depth, match.device_depth) == (2, 0 if tier is Tier.HOST else 2)
    visitor = world.arrive([*TOKENS, 9, 9])
    answer(world)
    assert world.admit(visitor)
    assert visitor.done == 2
    allocation = visitor.allocation
    assert allocation is not None
    kept = {part.node.start + len(part.node) for part in allocation.lock.parts}
    assert max(kept) == 2, "nothing below the anchor is locked or loaded for it"
    compute_all(world, visitor)
    world.settle()


@pytest.mark.parametrize("name", NAMES)
def test_b6_what_goes_down_and_comes_back_goes_with_every_pool(name: str) -> None:
    for seed in range(3):
        world = world_of(name, seed, adversarial=True)
        visit(world, TOKENS)
        parts = [node.parts for node in world.manager.tree.accounts.nodes()]
        assert all(set(host) == set(device) for device, host in parts)
        forget(world, Tier.DEVICE)
        assert visit(world, [*TOKENS, 9, 9]) == PAGES
        forget(world, Tier.DEVICE, Tier.HOST)
        assert visit(world, [*TOKENS, 9, 9, 8, 8]) == PAGES + 1
        world.settle()


def test_b7_a_move_is_built_from_copies_and_follows_nobodys_edits() -> None:
    sources, targets = {"full": [1, 2]}, {"full": [3, 4]}
    move = PageMove.of(sources, targets)
    sources["full"][0], targets["full"][1] = 9, 9
    (part,) = move.parts
    assert (part.sources, part.targets) == ((1, 2), (3, 4))


def test_b7_a_save_and_a_load_change_nothing_that_the_tree_owns() -> None:
    world = world_of("all", adversarial=True)
    visitor = admitted(world, TOKENS)
    compute_all(world, visitor)
    owned = {
        (id(node), tier, name): (part.lease.indices, part.digests)
        for node in world.manager.tree.accounts.nodes()
        for tier in (Tier.DEVICE, Tier.HOST)
        for name, part in node.parts[tier].items()
    }
    world.send(visitor)
    world.manager.tree.lock(world.manager.tree.match(visitor.prefix), "a reader")
    answer(world)
    for node in world.manager.tree.accounts.nodes():
        for tier in (Tier.DEVICE, Tier.HOST):
            for name, part in node.parts[tier].items():
                assert owned[id(node), tier, name] == (part.lease.indices, part.digests)


def a_part(world: World, name: str = "full", tier: Tier = Tier.DEVICE) -> Any:
    return next(n for n in world.manager.tree.accounts.nodes() if name in n.parts[tier]).parts[tier][name]


def _drop(part: Any) -> None:
    del part.node.parts[part.tier][part.component]


PLANTS: dict[str, tuple[Callable[[World], object], str]] = {
    "size": (
        lambda w: w.manager.tree.accounts.sizes.update({(Tier.DEVICE, "full"): 3}),
        r"tree: full on device: .* counted 3",
    ),
    "protected": (
        lambda w: w.manager.tree.accounts.protected.update({(Tier.HOST, "window"): 9}),
        r"tree: window on host: .* 9$",
    ),
    "lock": (lambda w: setattr(a_part(w), "locks", NO_LOCKS), "its locks differ from the tokens that hold it"),
    "token": (lambda w: next(x for x in w.manager.tree.locks.locked if x.parts).parts.pop(), "its locks differ"),
    "queue": (lambda w: setattr(a_part(w, tier=Tier.HOST), "entry", None), "queued"),
    "children": (lambda w: a_part(w).node.parent.below.__setitem__(0, 5), "children in the tiers, it counts"),
    "digest": (lambda w: setattr(a_part(w), "_digests", (1,) * PAGES), "digests differ from the other tier's"),
    "without full": (lambda w: _drop(a_part(w, tier=Tier.HOST)), "on host without full"),
    "lease": (lambda w: a_part(w, "window").lease.release(), "its lease has ended"),
    "table": (lambda w: w.visitors[0].allocation.tables["full"].pages.__setitem__(0, 33), "neither its own nor locked"),  # type: ignore[union-attr]
    "epoch": (lambda w: w.pools.allocators["full"].epochs.bump(a_part(w).lease.indices[:1]), "old epoch"),
    "leak": (lambda w: w.pools.allocators["state"].lease(1, "nobody"), "state pages: .* in use"),
    "host leak": (lambda w: w.host.allocators["full"].lease(1, "nobody"), "host full pages: .* in use"),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("plant", PLANTS)
def test_b8_check_recomputes_everything_and_names_what_is_planted(plant: str) -> None:
    world = world_of("all")
    visit(world, TOKENS)
    admitted(world, [*TOKENS, 9, 9])
    assert world.check() == []
    act, words = PLANTS[plant]
    act(world)
    found = world.check()
    assert found
    assert any(re.search(words, line) for line in found), found


def test_b9_a_prefix_is_locked_before_room_is_counted_and_let_go_when_there_is_none() -> None:
    world = world_of("full", pages=9, host_pages=0)
    visit(world, TOKENS)
    tree, free = world.manager.tree, world.pools.allocators["full"].free
    assert free == 4
    prefix = TokenPrefix.of([*TOKENS, *[9] * 10], PAGE_TOKENS)
    assert world.manager.allocations.allocate(prefix, 2 * 9, "too much", reusable=PAGES) is None, (
        "it would evict what it reuses"
    )
    assert tree.match(prefix).depth == PAGES, "nothing was taken from the tree for it"
    assert (len(tree.locks), world.pools.allocators["full"].free) == (0, free)
    allocation = world.manager.allocations.allocate(prefix, 2 * 8, "fits", reusable=PAGES)
    assert allocation is not None
    assert (allocation.depth, world.pools.allocators["full"].free) == (PAGES, 0)
    world.manager.allocations.free(allocation)
    assert world.check() == []
    world.settle()


# ------------------------------------------------------------ progress


@pytest.mark.parametrize("name", ["full+window", "full+state", "all"])
def test_c1_a_prefetch_is_over_when_every_pool_has_come_and_not_before(name: str) -> None:
    world = world_of(name)
    visit(world, TOKENS, pages=1)
    forget(world, Tier.DEVICE, Tier.HOST)
    visitor = world.arrive([*TOKENS, 9, 9])
    queue, prefetch = world.queue, visitor.prefetch
    assert queue is not None
    assert prefetch is not None
    assert queue.run_next(), "storage says what it has"
    world.poll()
    while queue.run_next():
        assert not prefetch.over
        assert not world.manager.tiers.prefetcher.may_run(prefetch), "some pools have come, others have not"
        world.poll()
    assert prefetch.over
    assert prefetch.gained == PAGES
    assert world.admit(visitor)
    assert visitor.done == PAGES
    compute_all(world, visitor)
    world.settle()


def test_c2_nothing_in_storage_ends_a_prefetch_at_once_as_nothing_and_not_as_done() -> None:
    world = world_of("all")
    visitor = world.arrive(TOKENS)
    assert visitor.prefetch is not None
    assert not world.manager.tiers.prefetcher.may_run(visitor.prefetch), "not known yet is not nothing"
    assert world.queue is not None
    world.queue.run_next()
    world.poll()
    assert world.manager.tiers.prefetcher.may_run(visitor.prefetch)
    assert (visitor.prefetch.gained, visitor.prefetch.target) == (0, 0)
    assert set(world.manager.tiers.prefetcher.counters.values()) == {0.0}
    assert world.admit(visitor)
    assert visitor.allocation is not None
    assert visitor.allocation.cached.total == 0
    world.settle()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_prefetch_brought_stays_on_the_host_until_its_request_is_admitted_or_gone(name: str) -> None:
    world = world_of(name)
    visit(world, TOKENS, pages=1)
    for admit in (True, False):
        forget(world, Tier.DEVICE, Tier.HOST)
        visitor = world.arrive([*TOKENS, 9, 9])
        prefetch, prefetcher, tree = visitor.prefetch, world.manager.tiers.prefetcher, world.manager.tree
        assert prefetch is not None
        answer(world)
        assert (prefetch.over, prefetch.gained) == (True, PAGES)
        forget(world, Tier.HOST)
        assert tree.match(visitor.prefix).depth == PAGES, "others' pages make room, not those it waited for"
        if admit:
            assert world.admit(visitor)
            assert visitor.done == PAGES
            compute_all(world, visitor)
        else:
            prefetcher.release(prefetch)
            forget(world, Tier.HOST)
            assert tree.match(visitor.prefix).depth == 0
        world.leave(visitor)
        answer(world)
    world.settle()


def test_pages_that_come_to_the_host_while_storage_is_asked_stay_there_for_what_it_brings() -> None:
    world = world_of("full", adversarial=True)
    visit(world, TOKENS, pages=1)
    forget(world, Tier.DEVICE, Tier.HOST)
    visit(world, TOKENS[:4])
    forget(world, Tier.HOST)
    assert world.adversarial is not None
    assert world.queue is not None
    visitor = world.arrive([*TOKENS, 9, 9])
    assert visitor.prefetch is not None
    assert visitor.prefetch.held == 2, "on the device alone: they are saved now"
    world.adversarial.settle()
    world.queue.run_all()
    world.poll()
    world.queue.run_next()  # They go to storage first, which keeps them as long.
    world.manager.tiers.backup.poll()
    forget(world, Tier.HOST)
    answer(world)
    assert (visitor.prefetch.over, visitor.prefetch.gained) == (True, 2)
    assert world.admit(visitor)
    compute_all(world, visitor)
    world.settle()


@pytest.mark.parametrize("held", range(1, PAGES + 1))
def test_what_storage_has_behind_a_prefix_of_any_length_on_the_host_is_found_with_the_window_that_reaches_back(
    held: int,
) -> None:
    """A window before the new end begins on pages that the host has already: they are part of what has to be there."""
    longer = [*TOKENS, 9, 9]
    world = world_of("full+window")
    visit(world, longer[: 2 * held])
    visit(world, longer)
    forget(world, Tier.DEVICE)
    world.evict(Tier.HOST, "full", PAGES + 1 - held)
    host = {
        node.start + len(node.parts[Tier.HOST]["full"])
        for node in world.manager.tree.accounts.nodes()
        if node.parts[Tier.HOST]
    }
    assert max(host, default=0) == held, "the end of it is on storage alone"
    visitor = world.arrive([*longer, 8, 8])
    visitor.reusable = PAGES + 1
    answer(world)
    assert world.admit(visitor)
    assert visitor.done == PAGES + 1
    compute_all(world, visitor)
    world.settle()
