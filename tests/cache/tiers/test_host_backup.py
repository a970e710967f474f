"""Copies down to the host whose room, copy or nodes fail half way: nothing is kept, and the next ones go well."""

from __future__ import annotations

import pytest

from tests.cache.test_hazards_tiers import PAGE_TOKENS, PAGES, TOKENS, answer, forget, visit, world_of
from tests.cache.tiers.test_storage_backup import Office
from tests.support.cache_harness import World
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.cache.storage.io_queue import StorageOp
from twinpool.cache.storage.storage_backend import ObjectName


def host_leases(world: World) -> dict[str, int]:
    assert world.host is not None
    return {pool: allocator.total - allocator.free for pool, allocator in world.host.allocators.items()}


@pytest.mark.parametrize("short", ["full", "window", "state"])
def test_a_save_that_one_pool_has_no_room_for_takes_no_room_of_the_others(short: str) -> None:
    """Others' pages fill one pool of the host: what was leased of the pools before it comes back, and its locks go."""
    world = world_of("all", write_policy="back")
    world.disturbed = True
    visit(world, TOKENS)
    assert world.host is not None
    allocator = world.host.allocators[short]
    others = allocator.lease(allocator.free, "others")
    backup = world.manager.tiers.backup
    assert not backup.save(world.manager.tree.accounts.nodes())
    answer(world)
    kept = host_leases(world)
    for node in world.manager.tree.accounts.nodes():
        for pool, part in node.parts[Tier.HOST].items():
            kept[pool] -= len(part)
    assert kept == {pool: len(others) if pool == short else 0 for pool in kept}, "what is leased is in the tree"
    assert backup.locks == 0
    others.release()
    assert backup.save(world.manager.tree.accounts.nodes())
    answer(world)
    assert all(
        set(node.parts[Tier.HOST]) == set(node.parts[Tier.DEVICE]) for node in world.manager.tree.accounts.nodes()
    )
    world.settle()


def test_every_page_that_the_host_has_no_room_for_is_counted_as_left_out() -> None:
    """The beginning of a prefix of four nodes fits, or nothing of it: what was left out is all the rest."""
    for room in range(PAGES + 1):
        world = world_of("full", write_policy="back", storage=False)
        for pages in range(1, PAGES + 1):
            visit(world, TOKENS[: PAGE_TOKENS * pages])
        assert world.host is not None
        allocator, manager = world.host.allocators["full"], world.manager
        others = allocator.lease(allocator.free - room, "others")
        assert manager.tiers.backup.save(manager.tree.accounts.nodes()) is (room == PAGES)
        answer(world)
        saved = sum(len(node) for node in manager.tree.accounts.nodes() if node.parts[Tier.HOST])
        stats = manager.stats()
        assert stats["pages_saved"] == saved <= room
        assert stats["saves_left_out"] == PAGES - saved
        others.release()


@pytest.mark.parametrize("gone", ["invalidated", "evicted"])
def test_pages_whose_node_has_gone_while_they_were_copied_are_nobodys(gone: str) -> None:
    """The copy ends later than its node: there is no place for it, and its pages are free."""
    for seed in range(4):
        world = world_of("all", seed, adversarial=True, write_policy="back", storage=False)
        world.disturbed = True
        visit(world, TOKENS)
        answer(world)
        nodes = list(world.manager.tree.accounts.nodes())
        before = host_leases(world)
        assert world.manager.tiers.backup.save(nodes)
        if gone == "invalidated":
            world.manager.tree.eviction.invalidate(nodes[0])
        else:
            forget(world, Tier.DEVICE)
        answer(world)
        there = [node for node in world.manager.tree.accounts.nodes() if node.parts[Tier.HOST]]
        assert all(node.linked for node in there)
        if gone == "invalidated":
            assert (there, host_leases(world)) == ([], before)
        assert world.check() == []
        world.settle()


def test_pages_that_were_invalidated_while_they_were_copied_are_told_to_nobody_and_missed_by_nobody() -> None:
    """Whoever follows the tree's events would send requests here for them, and never hear that they have gone."""
    world = world_of("full", adversarial=True, write_policy="back")
    world.disturbed = True
    visit(world, TOKENS)
    answer(world)
    told: list[tuple[Tier, bool]] = []

    world.manager.tree.accounts.observe_nodes(lambda _, tier, there: told.append((tier, there)))
    (node,) = world.manager.tree.accounts.nodes()
    assert world.manager.tiers.backup.save([node])
    world.manager.tree.eviction.invalidate(node)
    answer(world)
    assert told == [(Tier.DEVICE, False)]
    stats = world.manager.stats()
    assert (stats["pages_saved"], stats["stores_missed"], stats["stores_waiting"]) == (0, 0, 0)
    world.settle()


def test_a_part_of_which_storage_takes_some_at_each_try_is_offered_again_without_longer_rests() -> None:
    """Only tries that store nothing of it make its rests longer."""
    office = Office(line=1 << 20)
    allowed = 0

    def fault(op: StorageOp, name: ObjectName) -> str | None:
        nonlocal allowed
        if op is not StorageOp.WRITE:
            return None
        allowed -= 1
        return "the disk is full" if allowed < 0 else None

    office.queue.fault = fault
    tokens = range(40)
    prefix = office.ask(tokens)
    rounds, before = 0, -1
    while len(office.stored(prefix)) < 20:
        allowed = 2
        there = len(office.stored(prefix))
        assert there != before or rounds < 200
        office.work()
        rounds += 1
        assert rounds < 60, f"{there} of 20 pages are stored after {rounds} seconds"
    assert office.stored(prefix) == list(range(20))
