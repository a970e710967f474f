"""What the tree's operations cost, in lines executed and bytes copied: never more for what they don't touch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.support.executed_lines import allocated, steps
from tests.support.pool_sets import pool_sets
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import IN_TREE, PageOffer, Tier, TokenPrefix
from twinpool.contracts.config.cache_config import CacheConfig

PAGE_TOKENS = 4


class Path:
    """A manager whose tree has one path of many nodes, a page each, as a conversation of many turns leaves it."""

    def __init__(self, nodes: int, policy: str = "through") -> None:
        spec = pool_sets(PAGE_TOKENS)["full"]
        self.pools, host = PoolSet(spec, {"full": 2 * nodes + 9}), PoolSet(spec, {"full": 2 * nodes + 9})
        config = CacheConfig(write_policy="back" if policy == "back" else "selective", write_hits=1 << 20)
        self.manager = KVCacheManager(
            self.pools, CpuDevice(), config, time.monotonic, below=LowerTiers(host if policy == "back" else None)
        )
        self.positions = nodes * PAGE_TOKENS
        self.prefix = TokenPrefix.of(range(self.positions), PAGE_TOKENS)
        for page in range(nodes):
            self.insert(page)

    def insert(self, page: int) -> None:
        lease = self.pools.allocators["full"].lease(1, "a request")
        self.manager.tree.insert(self.prefix.head(page + 1), {"full": [PageOffer(page, lease, [page])]})
        lease.release()

    def allocate(self) -> None:
        allocation = self.manager.allocations.allocate(
            self.prefix, self.positions + 1, "a request", reusable=len(self.prefix)
        )
        assert allocation is not None
        assert allocation.depth == len(self.prefix)
        self.manager.allocations.free(allocation)

    def receive(self) -> None:
        allocation, leases = self.manager.allocations.preallocate(
            self.prefix, self.positions, self.positions + 1, "a request"
        ) or (
            None,
            {},
        )
        assert allocation is not None
        assert not allocation.lacking["full"]
        self.manager.allocations.commit_transfer(allocation, self.positions, leases, {})
        self.manager.allocations.free(allocation)
        for lease in leases.values():
            lease.release()

    def share(self) -> None:
        allocation = self.manager.allocations.allocate(
            self.prefix, self.positions + 1, "a request", reusable=len(self.prefix)
        )
        assert allocation is not None
        self.manager.finished.cache_pages(allocation, self.prefix)
        self.manager.allocations.free(allocation)

    def invalidate(self) -> None:
        lock = self.manager.tree.lock(self.manager.tree.match(self.prefix), "a reader")
        self.manager.tree.invalidate(self.prefix)
        self.manager.tree.locks.unlock(lock)
        assert not self.manager.tree.accounts.invalidated
        assert not self.manager.tree.accounts.roots

    def evict(self) -> None:
        assert self.manager.tree.eviction.evict(Tier.DEVICE, "full", len(self.prefix)) == len(self.prefix)


OPERATIONS: dict[str, Callable[[Path], None]] = {
    "allocate and release": Path.allocate,
    "reserve, adopt and release": Path.receive,
    "share": Path.share,
    "invalidate": Path.invalidate,
    "evict": Path.evict,
}


@pytest.mark.parametrize("policy", ["through", "back"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_done_to_a_path_costs_its_nodes_and_not_their_square(operation: str, policy: str) -> None:
    def cost(nodes: int) -> int:
        path = Path(nodes, policy)
        run = steps(lambda: OPERATIONS[operation](path))
        assert path.manager.check() == []
        return run

    few, many = cost(32), cost(512)
    assert many < 16 * 1.25 * few, f"{few} lines for 32 nodes, {many} for 512"


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_lock_deep_down_a_path_is_taken_and_given_back_once_for_all_that_is_above(policy: str) -> None:
    path = Path(256, policy)
    tree = path.manager.tree
    lock = tree.lock(tree.match(path.prefix), "somebody else")
    last = tree.walked(path.prefix)[-1][0].parts[Tier.DEVICE]["full"]
    assert steps(lambda: tree.locks.unlock(tree.locks.keep([last], "a move"))) < 150
    assert tree.check() == []
    tree.locks.unlock(lock)
    assert tree.check() == []
    assert tree.eviction.evict(Tier.DEVICE, "full", 256) == 256


def _salted(salts: int) -> RadixTree:
    spec = pool_sets(PAGE_TOKENS)["full"]
    tree, pools = RadixTree(spec), PoolSet(spec, {"full": salts + 1})
    for number in range(salts):
        lease = pools.allocators["full"].lease(1, "a request")
        tree.insert(
            TokenPrefix.of(range(PAGE_TOKENS), PAGE_TOKENS, f"tenant {number}"), {"full": [PageOffer(0, lease, [1])]}
        )
        lease.release()
    return tree


def test_evicting_a_page_costs_the_same_however_many_salts_there_are() -> None:
    few, many = _salted(20), _salted(2000)
    cost = {
        len(tree.accounts.roots): steps(partial(tree.eviction.evict, Tier.DEVICE, "full", 10)) for tree in (few, many)
    }
    assert (len(few.accounts.roots), len(many.accounts.roots)) == (10, 1990), (
        "nothing is kept of a salt that holds nothing"
    )
    assert cost[2000] < 1.2 * cost[20], cost
    copied = allocated(lambda: many.eviction.evict(Tier.DEVICE, "full", 10))
    assert copied < 16_384, f"{copied} bytes to evict ten pages of ten salts of {len(many.accounts.roots)}"
    assert many.check() == []


def _leaf(pages: int, host: bool) -> RadixTree:
    spec = pool_sets(PAGE_TOKENS)["full"]
    tree, prefix = RadixTree(spec), TokenPrefix.of(range(pages * PAGE_TOKENS), PAGE_TOKENS)
    for tier in IN_TREE[: 1 + host]:
        lease = PoolSet(spec, {"full": pages + 1}).allocators["full"].lease(pages, "a request")
        tree.insert(prefix, {"full": [PageOffer(0, lease, list(range(pages)))]}, tier)
        lease.release()
    return tree


@pytest.mark.parametrize("host", [False, True], ids=["device alone", "on the host too"])
def test_evicting_the_last_page_of_a_leaf_costs_the_same_however_long_it_is(host: bool) -> None:
    short, long = _leaf(64, host), _leaf(16_384, host)
    for tree in (short, long):
        assert tree.eviction.evict(Tier.DEVICE, "full", 1) == 1
    cost = [steps(partial(tree.eviction.evict, Tier.DEVICE, "full", 1)) for tree in (short, long)]
    assert cost[1] <= cost[0] + 20, cost
    copied = [allocated(partial(tree.eviction.evict, Tier.DEVICE, "full", 1)) for tree in (short, long)]
    assert copied[1] < 16_384, f"{copied[1]} bytes copied to evict one page of {16_384 * PAGE_TOKENS} tokens"
    for tree, pages in ((short, 64), (long, 16_384)):
        assert tree.accounts.sizes[Tier.DEVICE, "full"] == pages - 3
        assert tree.check() == []


@pytest.mark.parametrize("host", [False, True], ids=["device alone", "on the host too"])
def test_a_leaf_that_lost_its_end_page_by_page_is_what_is_left_of_it(host: bool) -> None:
    tree, prefix = _leaf(40, host), TokenPrefix.of(range(40 * PAGE_TOKENS), PAGE_TOKENS)
    for left in range(39, -1, -1):
        assert tree.eviction.evict(Tier.DEVICE, "full", 1) == 1
        match = tree.match(prefix)
        assert (match.device_depth, match.depth) == (left, 40 if host else left)
        along = [node for node, _ in tree.walked(prefix)]
        assert b"".join(node.raw for node in along) == prefix.head(match.depth).raw
        assert b"".join(node.chain for node in along) == prefix.head(match.depth).chain
        digests = [d for node in along for d in (node.parts[Tier.DEVICE]["full"].digests if node.parts[0] else ())]
        assert digests == list(range(left))
        assert tree.check() == []


def test_queues_of_what_may_go_are_no_longer_than_what_is_there_however_much_came_and_went() -> None:
    spec = pool_sets(PAGE_TOKENS)["full+window"]
    pools = PoolSet(spec, {"full": 65, "window": 4097})
    tree = RadixTree(spec)

    def lease(pool: str, count: int) -> Lease:
        allocator = pools.allocators[pool]
        if count > allocator.free:
            tree.eviction.evict(Tier.DEVICE, pool, count - allocator.free)
        return allocator.lease(count, "a request")

    for request in range(400):
        prefix = TokenPrefix.of(range(32 * request, 32 * request + 32), PAGE_TOKENS)
        full, window = lease("full", 8), lease("window", 2)
        tree.insert(prefix, {"full": [PageOffer(0, full, [1] * 8)], "window": [PageOffer(6, window, [2] * 2)]})
        full.release()
        window.release()
    assert tree.accounts.sizes[Tier.DEVICE, "window"] <= 16
    for (tier, name), queue in tree.eviction.order.queues.items():
        held = sum(name in node.parts[tier] for node in tree.accounts.nodes())
        assert queue.places <= 1.5 * held + 64, f"{queue.places} places in the queue of {name} for {held} parts"
    assert tree.check() == []


def test_what_was_used_again_isn_t_left_for_the_next_eviction_to_sort() -> None:
    tree = _salted(400)
    for number in range(399):
        prefix = TokenPrefix.of(range(PAGE_TOKENS), PAGE_TOKENS, f"tenant {number}")
        tree.locks.unlock(tree.lock(tree.match(prefix), "a request"))
    cost = steps(lambda: tree.eviction.evict(Tier.DEVICE, "full", 1))
    assert "tenant 399" not in tree.accounts.roots, "the one that nobody used again"
    assert cost < 200, f"{cost} lines to evict one page, after 399 others were used"
    assert tree.check() == []


def test_sharing_the_last_chunk_of_a_prompt_costs_no_more_than_sharing_the_first() -> None:
    path = Path(0)
    spec, pages, chunk = path.manager.spec, 4000, 500
    manager = KVCacheManager(PoolSet(spec, {"full": pages + 9}), CpuDevice(), CacheConfig(), time.monotonic)
    prefix = TokenPrefix.of(range(pages * PAGE_TOKENS), PAGE_TOKENS)
    allocation = manager.allocations.allocate(prefix, pages * PAGE_TOKENS, "a request", reusable=0)
    assert allocation is not None
    costs = []
    for end in range(chunk, pages + 1, chunk):
        manager.finished.seal([(allocation, end * PAGE_TOKENS)])
        costs.append(steps(partial(manager.finished.cache_pages, allocation, prefix.head(end))))
    assert max(costs[1:]) < 1.5 * costs[0], costs
    manager.allocations.free(allocation)
    assert manager.check() == []
