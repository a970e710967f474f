"""Prefixes: the same tokens make the same bytes and keys, whichever way they came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pool_sets import pool_sets
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import PageOffer, TokenPrefix, common_pages
from twinpool.contracts.block_hash import KEY_BYTES, block_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.slow
@given(TOKENS, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["", "tenant"]))
def test_a_list_and_an_array_make_the_same_prefix_with_the_keys_of_its_pages(
    tokens: list[int], page: int, salt: str
) -> None:
    prefix = TokenPrefix.of(tokens, page, salt)
    whole = tokens[: len(tokens) // page * page]
    words: Any = np.asarray(tokens, dtype=np.int64)
    assert prefix.raw == TokenPrefix.of(words, page, salt).raw
    assert list(prefix.tokens()) == whole
    assert prefix.chain == b"".join(block_hashes(whole, page, salt))


@pytest.mark.slow
@given(TOKENS, TOKENS, st.sampled_from([1, 4]), st.booleans(), st.integers(0, 10))
def test_a_longer_prefix_has_the_keys_of_one_made_at_once(
    tokens: list[int], more: list[int], page: int, asked: bool, head: int
) -> None:
    prefix = TokenPrefix.of(tokens, page, "salt").head(head)
    if asked:
        assert len(prefix.chain) == KEY_BYTES * len(prefix)
    longer = prefix.longer(more)
    at_once = TokenPrefix.of([*prefix.tokens(), *more], page, "salt")
    assert (longer.raw, longer.chain) == (at_once.raw, at_once.chain)


@pytest.mark.slow
@given(TOKENS, TOKENS, TOKENS, st.sampled_from([1, 2, 4]), st.integers(0, 3))
@settings(max_examples=300)
def test_common_pages_are_those_that_a_walk_by_page_finds(
    same: list[int], one: list[int], other: list[int], page: int, at: int
) -> None:
    run = TokenPrefix.of([*same, *one], page).raw
    raw = b"\7" * (4 * page * at) + TokenPrefix.of([*same, *other], page).raw
    size = 4 * page
    rest = raw[size * at :]
    count = 0
    while (count + 1) * size <= min(len(run), len(rest)) and run[: (count + 1) * size] == rest[: (count + 1) * size]:
        count += 1
    assert common_pages(run, raw, size * at, size) == count


def test_the_tree_hashes_only_what_it_lacks_and_comes_to_the_same_keys() -> None:
    tree, allocator = RadixTree(pool_sets()["full"]), PageAllocator("full pages", 99, first=1)

    def insert(tokens: list[int]) -> TokenPrefix:
        prefix = TokenPrefix.of(tokens, 4)
        held = tree.match(prefix).depth
        lease = allocator.lease(len(prefix) - held, "request")
        tree.insert(prefix, {"full": [PageOffer(held, lease, range(held, len(prefix)))]})
        return prefix

    insert([*range(24)])
    branch = insert([*range(14), 90, 91, *range(50, 60)])
    assert branch.chain == b"".join(block_hashes(branch.tokens(), 4))
    assert {bytes(node.chain) for node in tree.accounts.nodes()} == {
        TokenPrefix.of(range(24), 4).chain[: 3 * KEY_BYTES],
        TokenPrefix.of(range(24), 4).chain[3 * KEY_BYTES :],
        branch.chain[3 * KEY_BYTES :],
    }


def test_of_the_known_hashes_those_of_whole_pages_count() -> None:
    """A prompt's last hash is of a page that isn't full."""
    tokens = list(range(10))
    keys = block_hashes(tokens, 4)
    assert len(keys) == 3
    prefix = TokenPrefix.of(tokens, 4, chain=keys)
    assert (len(prefix), prefix.chain) == (2, b"".join(keys[:2]))
    longer = prefix.longer([10, 11])
    assert longer.chain == b"".join(block_hashes(range(8), 4)) + longer.key(2)
    assert len(longer.chain) == KEY_BYTES * len(longer)
