"""Layouts, moves and tags, over pool sets of every kind and both orders."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool_sets import NAMES, entry, filled, pool_sets
from twinpool.cache.memory.kv_cache_spec import (
    BufferSpec,
    IndexSpace,
    LayoutOrder,
    PoolKind,
    PoolSetLayout,
    PoolSetSpec,
    PoolSpec,
)
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.cache.memory.page_moves import PageMove, PoolMove, copy_state, gather, scatter
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.block_hash import block_hashes

ORDERS = list(LayoutOrder)


def made(name: str, page_tokens: int, count: int, order: LayoutOrder, seed: int) -> PoolSet:
    spec = pool_sets(page_tokens)[name]
    return filled(PoolSet(spec, spec.even(count), order=order), seed)


@pytest.mark.parametrize("orders", [(a, b) for a in ORDERS for b in ORDERS])
@pytest.mark.parametrize("page_tokens", [1, 4, 64])
@pytest.mark.parametrize("name", NAMES)
def test_a3_a_copy_carries_every_buffer_of_the_registry_and_nothing_else(
    name: str, page_tokens: int, orders: tuple[LayoutOrder, LayoutOrder]
) -> None:
    source = made(name, page_tokens, 9, orders[0], 1)
    target = made(name, page_tokens, 13, orders[1], 2)
    pools = list(source.spec.by_name)
    before = {(pool, i): entry(target, pool, i) for pool in pools for i in range(13)}
    moved = {pool: {12: 3, 5: 8, 1: n} for n, pool in enumerate(pools, 1)}
    move = PageMove(tuple(PoolMove(pool, tuple(m.values()), tuple(m)) for pool, m in moved.items()))
    assert move.nbytes(source.spec) == 3 * sum(source.spec.unit_bytes(p) for p in pools)
    for piece in move.chunks(source.spec, 2 * source.spec.page_bytes):
        copy_state(piece, source.region, source.layout, target.region, target.layout)
    for (pool, index), old in before.items():
        want = entry(source, pool, moved[pool][index]) if index in moved[pool] else old
        assert entry(target, pool, index) == want, (pool, index)


@pytest.mark.parametrize("name", NAMES)
def test_a_move_layer_by_layer_is_the_move(name: str) -> None:
    source, target = made(name, 4, 5, LayoutOrder.PAGE_FIRST, 1), made(name, 4, 5, LayoutOrder.LAYER_FIRST, 2)
    move = PageMove(tuple(PoolMove(pool, (1, 3), (4, 2)) for pool in source.spec.by_name))
    for layer in range(max(p.layers for p in source.spec.pools)):
        copy_state(move, source.region, source.layout, target.region, target.layout, range(layer, layer + 1))
    for pool in source.spec.by_name:
        assert [entry(target, pool, i) for i in (4, 2)] == [entry(source, pool, i) for i in (1, 3)]


def test_a_move_in_which_a_pool_has_nothing_to_do_is_ordinary() -> None:
    move = PageMove.of({"full": [1, 2], "window": []}, {"full": [3, 4]})
    assert len(move) == 2
    assert len(PageMove.of({}, {"full": []})) == 0
    with pytest.raises(ValueError, match="a move from pools"):
        PageMove.of({"full": [1], "window": [2]}, {"full": [1]})
    with pytest.raises(ValueError, match="2 sources for 1 targets"):
        PageMove.of({"full": [1, 2]}, {"full": [3]})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_gathered_state_is_canonical_and_scatters_back_to_the_same_bytes(name: str, order: LayoutOrder) -> None:
    source, target = made(name, 4, 9, order, 1), made(name, 4, 5, order, 2)
    for pool in source.spec.by_name:
        packed = gather(source.region, source.layout, pool, [7, 2])
        assert [row.numpy().tobytes() for row in packed] == [b"".join(entry(source, pool, i)) for i in (7, 2)]
        scatter(packed, target.region, target.layout, pool, [1, 4])
        assert [entry(target, pool, i) for i in (1, 4)] == [entry(source, pool, i) for i in (7, 2)]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_first_page_is_contiguous_and_canonical(name: str) -> None:
    pools = made(name, 4, 6, LayoutOrder.PAGE_FIRST, 1)
    for pool in pools.spec.by_name:
        assert pools.layout.page(pools.region, pool, 3).numpy().tobytes() == b"".join(entry(pools, pool, 3))


def test_check_sees_a_written_null_page() -> None:
    spec = pool_sets(4)["all"]
    pools = PoolSet(spec, spec.even(5))
    assert pools.check() == []
    pools.gates["window"].layer(1)["window_v"][0, 0, 0, 0] = 1.0
    assert pools.check() == ["window pages: the null page of window_v isn't zero in layers [1]"]


def test_a_closed_pool_set_gives_its_memory_back() -> None:
    spec = pool_sets(4)["all"]
    pools = PoolSet(spec, spec.even(5))
    memory = pools.region.untyped_storage()._weak_ref()
    lease = pools.allocators["full"].lease(1, "a request")
    with pytest.raises(ValueError, match="full pages are still leased"):
        pools.close()
    lease.release()
    pools.close()
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)  # type: ignore[no-untyped-call]


def digest(pools: PoolSet, pages: list[int], positions: int, pool: str = "full") -> list[int]:
    size = pools.spec.page_tokens
    firsts = [i * size for i in range(len(pages))]
    ends = [min(first + size, positions) for first in firsts]
    return PageDigester(pools.layout).digest(pools.region, pool, pages, firsts, ends)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["sparse", "all"])
def test_every_single_byte_of_an_entry_is_in_its_digest(name: str, order: LayoutOrder) -> None:
    pools = made(name, 2, 4, order, 3)
    for pool in pools.spec.by_name:
        (clean,) = digest(pools, [2], 2, pool)
        for buffer in pools.layout.buffers[pool]:
            for layer in range(buffer.spec.layers):
                start = buffer.offset(layer, 2)
                for offset in range(start, start + buffer.entry_bytes):
                    pools.region[offset] ^= 1
                    assert digest(pools, [2], 2, pool) != [clean]
                    pools.region[offset] ^= 1
        assert digest(pools, [2], 2, pool) == [clean]


@pytest.mark.parametrize("name", NAMES)
def test_a_digest_is_the_same_in_either_order(name: str) -> None:
    source, target = made(name, 4, 5, LayoutOrder.LAYER_FIRST, 1), made(name, 4, 5, LayoutOrder.PAGE_FIRST, 2)
    for pool in source.spec.by_name:
        copy_state(
            PageMove((PoolMove(pool, (1, 3), (2, 4)),)), source.region, source.layout, target.region, target.layout
        )
        assert digest(source, [1, 3], 7, pool) == digest(target, [2, 4], 7, pool)


def heads(shape0: int, first: int) -> PoolSetSpec:
    pages = tuple(BufferSpec(n, 3, (shape0, 6), torch.float16, heads=4, first_head=first) for n in ("k", "v"))
    return PoolSetSpec(4, (PoolSpec("full", pages),))


def test_digests_add_up_over_slices_of_the_heads() -> None:
    whole = filled(PoolSet(heads(4, 0), {"full": 3}), 1)
    total = 0
    for first, count in ((0, 1), (1, 2), (3, 1)):
        part = PoolSet(heads(count, first), {"full": 3})
        for mine, theirs in zip(part.layout.buffers["full"], whole.layout.buffers["full"], strict=True):
            for layer in range(3):
                view = whole.layout.view(whole.region, "full", theirs, layer)
                part.layout.view(part.region, "full", mine, layer).copy_(view[:, :, first : first + count])
        total += digest(part, [2], 3)[0]
    assert digest(whole, [2], 3) == [total % 2**64]


def test_digests_add_up_over_page_sizes() -> None:
    small, large = made("full", 4, 9, LayoutOrder.LAYER_FIRST, 5), made("full", 16, 3, LayoutOrder.LAYER_FIRST, 6)
    for buffer, twin in zip(large.layout.buffers["full"], small.layout.buffers["full"], strict=True):
        for layer in range(buffer.spec.layers):
            pieces = small.layout.view(small.region, "full", twin, layer)[[3, 1, 8, 6]]
            view = large.layout.view(large.region, "full", buffer, layer)
            view[2] = pieces.reshape(view[2].shape)
    assert digest(large, [2], 16) == [sum(digest(small, [3, 1, 8, 6], 16)) % 2**64]
    assert digest(large, [2], 11) == [sum(digest(small, [3, 1, 8, 6], 11)) % 2**64]


def test_a_digest_tells_positions_layers_and_buffers_apart() -> None:
    pools = PoolSet(pool_sets(4)["full"], {"full": 4})
    k, v = (pools.gates["full"].layer(0)[name] for name in ("k", "v"))
    seen = set()
    for view, slot in ((k, 0), (k, 1), (v, 0)):
        view[1, slot] = 1.0
        seen.add(digest(pools, [1], 4)[0])
        view[1, slot] = 0.0
    pools.gates["full"].layer(1)["k"][1, 0] = 1.0
    seen.add(digest(pools, [1], 4)[0])
    assert len(seen) == 4


def test_chain_keys_name_the_whole_prefix_and_the_salt() -> None:
    one, other = block_hashes([1, 2, 3, 4, 5], 2), block_hashes([9, 2, 3, 4, 5], 2)
    assert len(one) == 3
    assert not set(one) & set(other)
    assert block_hashes([1, 2, 3, 4], 2) == one[:2]
    assert not set(block_hashes([1, 2], 2, "salt")) & set(one)
    assert block_hashes([1, 2, 3, 4, 5, 6], 2)[2] != one[2], "a partly filled page has a key of its own"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_layouts_overlap_nowhere(name: str, order: LayoutOrder) -> None:
    layout = PoolSetLayout(pool_sets(4)[name], pool_sets(4)[name].even(7), order)
    used = torch.zeros(layout.nbytes, dtype=torch.int32)
    for pool, buffer in layout.each():
        for layer in range(buffer.spec.layers):
            for index in range(layout.counts[pool.name]):
                start = buffer.offset(layer, index)
                used[start : start + buffer.entry_bytes] += 1
    assert used.max() == 1
    assert used.sum() == 7 * sum(layout.spec.unit_bytes(p) for p in layout.spec.by_name)


def test_a_registry_that_makes_no_sense_is_refused() -> None:
    k = BufferSpec("k", 1, (2,), torch.float32)
    with pytest.raises(ValueError, match="a state pool has no buffer by token"):
        PoolSpec("state", (k,), PoolKind.STATE)
    with pytest.raises(ValueError, match="window_tokens is for window pools"):
        PoolSpec("window", (k,), PoolKind.WINDOW)
    with pytest.raises(ValueError, match="exactly one full pool"):
        PoolSetSpec(4, (PoolSpec("window", (k,), PoolKind.WINDOW, 8),))
    with pytest.raises(ValueError, match=r"heads 3\.\.4 aren't among 4"):
        BufferSpec("k", 1, (2, 8), torch.float32, IndexSpace.TOKEN, 4, 3)
