"""What goes first, policy by policy, and what goes alone, with its leaf, or not at all."""

from __future__ import annotations

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.eviction_policy import POLICIES
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, PageOffer, Tier, TokenPrefix, TreeNode

PAGE_TOKENS = 2
A, B, C = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]


class Grove:
    """A tree and its pools, filled as requests would."""

    def __init__(self, name: str = "full", policy: str = "lru") -> None:
        spec = pool_sets(PAGE_TOKENS)[name]
        self.tree, self.pools = RadixTree(spec, POLICIES[policy]), PoolSet(spec, spec.even(30))

    def put(self, tokens: list[int], *pools: str, priority: int = 0, salt: str = "") -> None:
        """Insert what `tokens` computed of these pools, or of the full one alone."""
        prefix = TokenPrefix.of(tokens, PAGE_TOKENS, salt)
        offers = {}
        for pool in pools or ("full",):
            point = self.tree.component(pool).point
            count = 1 if point else len(prefix)
            lease = self.pools.allocators[pool].lease(count, "a request")
            keys = [prefix.key(len(prefix) - 1 if point else page)[:8] for page in range(count)]
            offers[pool] = [PageOffer(len(prefix) if point else 0, lease, [int.from_bytes(key) for key in keys])]
        self.tree.insert(prefix, offers, Tier.DEVICE, priority)
        for (offer,) in offers.values():
            offer.lease.release()
        assert self.tree.check() == []

    def depth(self, tokens: list[int], salt: str = "") -> int:
        return self.tree.match(TokenPrefix.of(tokens, PAGE_TOKENS, salt)).depth

    def use(self, tokens: list[int]) -> None:
        self.tree.locks.unlock(self.tree.lock(self.tree.match(TokenPrefix.of(tokens, PAGE_TOKENS)), "a use"))

    def evict(self, count: int, pool: str = "full") -> int:
        freed = self.tree.eviction.evict(Tier.DEVICE, pool, count)
        assert self.tree.check() == []
        return freed

    def left(self) -> list[str]:
        return [name for name, tokens in (("a", A), ("b", B), ("c", C)) if self.depth(tokens) == 2]


def test_a_node_that_is_cut_in_two_is_as_old_as_it_was_however_late_it_was_used() -> None:
    grove = Grove(policy="fifo")
    grove.put(A)
    grove.put(B)
    grove.use(A)
    grove.put([*A[:2], 9, 9])
    for below in (A, [*A[:2], 9, 9]):
        grove.tree.invalidate(TokenPrefix.of(below, PAGE_TOKENS), 1)
    assert grove.depth(A) == 1
    assert grove.evict(1) == 1
    assert (grove.depth(A), grove.depth(B)) == (0, 2)


def test_no_more_is_saved_than_there_is_to_be_room_for() -> None:
    """What is on its way to the host is room to come: each look for a page would else save the whole device."""
    grove, saved = Grove(), list[TreeNode]()
    grove.tree = RadixTree(grove.pools.spec, write_back=True)
    for tokens in (A, B, C):
        grove.put(tokens)

    def spill(node: TreeNode) -> bool:
        saved.append(node)
        return True

    for _ in range(2):
        assert grove.tree.eviction.evict(Tier.DEVICE, "full", 3, spill) == 0
        assert len(saved) == 2
        saved.clear()


@pytest.mark.parametrize(
    ("policy", "left"),
    [("lru", ["b", "c"]), ("fifo", ["b", "c"]), ("lfu", ["a", "b"]), ("priority", ["a", "b"]), ("slru", ["b", "c"])],
)
def test_the_policy_says_which_leaf_goes_first(policy: str, left: list[str]) -> None:
    grove = Grove(policy=policy)
    grove.put(A, priority=1)
    grove.put(B, priority=2)
    grove.put(C)
    grove.use(A)
    for _ in range(3):
        grove.use(B)
    grove.use(C) if policy in ("lru", "slru") else None
    assert grove.evict(2) == 2
    assert grove.left() == left


@pytest.mark.parametrize("first", [9, -1])
@pytest.mark.parametrize("shared", [A, A[:2]], ids=["whole", "half"])
def test_what_requests_share_has_the_priority_of_the_highest_of_them(shared: list[int], first: int) -> None:
    """Whichever comes first, and also where a node is cut in two for the other."""
    grove, other = Grove(policy="priority"), [*shared, 7, 7]
    grove.put(A, priority=first)
    lock = grove.tree.lock(grove.tree.match(TokenPrefix.of(A, PAGE_TOKENS)), "a request")
    assert grove.evict(100) == 0, "while it runs its pages are out of the line of what may go"
    grove.put(other, priority=8 - first)
    grove.put(B, priority=5)
    grove.put(C, priority=6)
    grove.tree.locks.unlock(lock)
    for tokens in (A, other):
        grove.tree.invalidate(TokenPrefix.of(tokens, PAGE_TOKENS), len(shared) // 2)
    assert grove.evict(4) == 4
    assert (grove.depth(B), grove.depth(C), grove.depth(shared)) == (0, 0, len(shared) // 2)


def test_what_was_hit_twice_outlives_what_was_seen_once_however_lately() -> None:
    grove = Grove(policy="slru")
    for tokens in (A, B, C):
        grove.put(tokens)
    grove.use(A)
    grove.use(A)
    grove.use(B)
    grove.use(C)
    grove.evict(2)
    assert grove.left() == ["a", "c"]
    grove.evict(2)
    assert grove.left() == ["a"]


def test_a_leaf_goes_from_its_end_and_before_what_is_above_it() -> None:
    grove = Grove()
    grove.put([*A, 7, 7])
    grove.put([*A, 8, 8])
    grove.use([*A, 8, 8])
    assert grove.evict(1) == 1
    assert (grove.depth([*A, 7, 7]), grove.depth([*A, 8, 8])) == (2, 3)
    assert grove.evict(2) == 2
    assert grove.depth(A) == 1, "the run that both shared, from its end"
    assert grove.evict(100) == 1
    assert grove.pools.allocators["full"].free == grove.pools.allocators["full"].total


def test_what_is_locked_stays_with_all_above_it() -> None:
    grove = Grove()
    grove.put([*A, 7, 7])
    grove.put(B)
    lock = grove.tree.lock(grove.tree.match(TokenPrefix.of(A, PAGE_TOKENS)), "a request")
    assert grove.tree.eviction.evictable("full") == 3
    assert grove.evict(100) == 3
    assert grove.depth(A) == 2
    grove.tree.locks.unlock(lock)
    assert grove.evict(100) == 2


def test_a_window_goes_alone_above_and_is_healed_by_the_same_tokens() -> None:
    grove, tokens = Grove("full+window"), [*A, 5, 5, 6, 6, 7, 7, 8, 8]
    grove.put(A, "full", "window")
    grove.put(tokens, "full", "window")
    assert grove.evict(2, "window") == 2
    assert grove.tree.accounts.sizes[Tier.DEVICE, "full"] == 6, "only the window's part of the inner node went"
    assert (grove.depth(A), grove.depth(tokens)) == (0, 6), "deep enough, the window doesn't reach the tombstone"
    grove.put(A, "full", "window")
    assert (grove.depth(A), grove.depth(tokens)) == (2, 6)


def test_a_state_goes_alone_above_and_with_its_leaf_below() -> None:
    grove = Grove("full+state")
    grove.put(A, "full", "state")
    grove.put([*A, 5, 5], "full", "state")
    assert grove.evict(1, "state") == 1
    assert (grove.depth(A), grove.depth([*A, 5, 5])) == (0, 3)
    assert grove.evict(1, "state") == 1
    assert grove.tree.accounts.sizes[Tier.DEVICE, "full"] == 2, "the leaf has gone with its state"


def test_salts_share_nothing() -> None:
    grove = Grove()
    grove.put(A, salt="tenant")
    assert (grove.depth(A), grove.depth(A, "tenant")) == (0, 2)
    grove.put(A)
    assert grove.tree.accounts.sizes[Tier.DEVICE, "full"] == 4


def test_a_match_is_whole_pages_and_a_part_of_a_node_will_do() -> None:
    grove = Grove()
    grove.put([*A, 5, 5])
    assert grove.depth([*A, 5, 9]) == 2
    assert grove.depth([*A, 5]) == 2
    assert grove.depth([1, 1]) == 1
    assert grove.depth([1]) == 0


def test_what_was_invalidated_is_never_found_and_leaves_with_its_last_lock() -> None:
    grove = Grove("full+window")
    grove.put([*A, 5, 5], "full", "window")
    lock = grove.tree.lock(grove.tree.match(TokenPrefix.of([*A, 5, 5], PAGE_TOKENS)), "a reader")
    assert grove.tree.invalidate(TokenPrefix.of([*A, 5, 5], PAGE_TOKENS), 1) == 2
    assert grove.depth([*A, 5, 5]) == 1
    assert grove.pools.allocators["full"].leases == 2
    grove.put([*A, 5, 5], "full", "window")
    assert grove.depth([*A, 5, 5]) == 3, "computed anew, it is as good as any"
    grove.tree.locks.unlock(lock)
    assert grove.tree.accounts.invalidated == []
    assert grove.tree.eviction.clear() == 3
    for allocator in grove.pools.allocators.values():
        assert allocator.free == allocator.total


@pytest.mark.parametrize("pool", ["window", "state"])
def test_what_the_host_has_no_room_for_goes_alone_while_the_full_state_of_its_node_is_being_saved(pool: str) -> None:
    """Found by random pairs with threads for copies: a save that is over at once keeps nothing locked."""
    grove = Grove("all")
    grove.put(A, "full", pool)
    saves: list[NodeLock] = []

    def begin(node: TreeNode) -> bool:
        saves.append(grove.tree.locks.keep([node.parts[Tier.DEVICE]["full"]], "save"))
        return False

    assert grove.tree.eviction.evict(Tier.DEVICE, pool, 1, begin) > 0
    (node,) = grove.tree.accounts.nodes()
    assert set(node.parts[Tier.DEVICE]) == {"full"}
    assert grove.tree.check() == []
    grove.tree.locks.unlock(saves.pop())
    assert grove.evict(2) == 2
