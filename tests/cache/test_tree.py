import random

from cache.leases import Allocator, Lease
from cache.tags import ContentTag
from cache.tree import PageKey, PrefixTree, page_keys

PAGE = 4


def tags(keys: list[PageKey]) -> list[ContentTag]:
    """Each names the whole prefix up to its page, as real ones do."""
    return [ContentTag(b"".join(keys[: i + 1]), i) for i in range(len(keys))]


def put(tree: PrefixTree, pages: Allocator, tokens: list[int], salt: str = "") -> Lease:
    """Compute `tokens` as a request would: match, lease the rest, insert, leave."""
    keys = page_keys(tokens, PAGE)
    match = tree.match(keys, salt)
    lease = pages.lease(len(keys) - len(match.pages), "request")
    tree.insert(keys, lease, len(match.pages), tags(keys), salt)
    tree.unlock(match.token)
    lease.release()
    return lease


def test_a_match_is_the_longest_shared_run_of_whole_pages() -> None:
    tree, pages = PrefixTree(), Allocator("pages", 50, first=1)
    put(tree, pages, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    assert tree.pages == 3
    match = tree.match(page_keys([1, 1, 1, 1, 2, 2, 2, 2, 9, 9, 9, 9], PAGE))
    assert len(match.pages) == len(match.tags) == 2
    assert len(tree.match(page_keys([1, 1, 1], PAGE)).pages) == 0
    assert tree.check() == []


def test_salts_share_nothing() -> None:
    tree, pages = PrefixTree(), Allocator("pages", 50, first=1)
    put(tree, pages, [1] * 8, salt="a")
    assert tree.match(page_keys([1] * 8, PAGE), "b").pages == ()
    assert len(tree.match(page_keys([1] * 8, PAGE), "a").pages) == 2


def test_b4_a_token_unlocks_what_it_locked_also_after_a_split() -> None:
    tree, pages = PrefixTree(), Allocator("pages", 50, first=1)
    put(tree, pages, [1] * 16)
    long = tree.match(page_keys([1] * 16, PAGE))
    short = tree.match(page_keys([1] * 8 + [2] * 8, PAGE))
    assert tree.check() == []
    tree.unlock(long.token)
    assert tree.evict(100) == 2, "the lower half is free, the upper is still locked by the second match"
    tree.unlock(short.token)
    tree.unlock(short.token)
    assert tree.evict(100) == 2
    assert pages.free == pages.total
    assert tree.check() == []


def test_eviction_takes_the_least_recently_used_leaf_from_its_tail() -> None:
    tree, pages = PrefixTree(), Allocator("pages", 50, first=1)
    put(tree, pages, [1] * 16)
    put(tree, pages, [2] * 16)
    tree.unlock(tree.match(page_keys([1] * 16, PAGE)).token)
    assert tree.evict(1) == 1
    assert len(tree.match(page_keys([1] * 16, PAGE)).pages) == 4
    assert len(tree.match(page_keys([2] * 16, PAGE)).pages) == 3


def test_random_use_never_leaks_and_matches_a_plain_dictionary() -> None:
    rng = random.Random(7)
    tree, pages = PrefixTree(), Allocator("pages", 40, first=1)
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 6))]
        keys = page_keys(tokens, PAGE)
        match = tree.match(keys)
        need = len(keys) - len(match.pages)
        if need > pages.free:
            tree.evict(need - pages.free)
        lease = pages.lease(need, "request")
        tree.insert(keys, lease, len(match.pages), tags(keys))
        again = tree.match(keys)
        assert again.pages[: len(match.pages)] == match.pages
        assert len(again.pages) == len(keys)
        assert list(match.tags) == tags(keys)[: len(match.pages)]
        assert list(again.tags) == tags(keys)
        tree.unlock(match.token)
        tree.unlock(again.token)
        lease.release()
        assert tree.check() == []
        assert pages.check() == []
        assert tree.pages == pages.total - pages.free == tree.evictable
    tree.evict(1000)
    assert pages.free == pages.total


def test_a9_what_is_condemned_is_not_matched_again_and_freed_with_its_last_lock() -> None:
    tree, pages = PrefixTree(), Allocator("pages", 50, first=1)
    keys = page_keys([1] * 16, PAGE)
    put(tree, pages, [1] * 16)
    put(tree, pages, [1] * 8 + [2] * 8)
    put(tree, pages, [3] * 8)
    reader = tree.match(keys)
    assert tree.condemn(keys) == 6
    assert tree.condemn(keys) == 0
    assert tree.match(keys).pages == ()
    assert (tree.pages, pages.free) == (6, pages.total - 6), "the branch that nobody reads went at once"
    lease = pages.lease(4, "computed again")
    assert tree.insert(keys, lease, 0, tags(keys)) == 0, "its place is taken until the last reader has left"
    assert tree.check() == []
    tree.unlock(reader.token)
    assert tree.pages == 2
    assert tree.insert(keys, lease, 0, tags(keys)) == 4
    assert len(tree.match(keys).pages) == 4
    assert tree.check() == []
    assert len(tree.match(page_keys([3] * 8, PAGE)).pages) == 2


def test_check_names_a_lost_lock() -> None:
    tree, pages = PrefixTree(), Allocator("pages", 50, first=1)
    put(tree, pages, [1] * 8)
    match = tree.match(page_keys([1] * 8, PAGE))
    next(n for n in tree._nodes() if n.parent is not None).locks.clear()
    assert tree.check() == ["tree node of 2 pages: its locks differ from the tokens that hold it"]
    assert match.pages
