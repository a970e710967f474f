"""Every way of copying and of digesting gives what the plain one gives: runs, single pages, many small ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from tests.support.pool_sets import NAMES, entry, filled, pool_sets
from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, LayoutOrder, PoolSetSpec, PoolSpec
from twinpool.cache.memory.page_digest import PageDigester, sum_by_numpy, sum_by_torch
from twinpool.cache.memory.page_moves import blocks, copy_block, copy_indexed, gather, packing, runs
from twinpool.cache.pool.pool_set import PoolSet

COUNT = 60


def spec_of(width: int, layers: int = 2) -> PoolSetSpec:
    """Keys and values of `width` bytes a token, two tokens a page."""
    buffers = tuple(BufferSpec(name, layers, (width,), torch.uint8) for name in "kv")
    return PoolSetSpec(2, (PoolSpec("full", buffers),))


def some_pages(kind: str, seed: int) -> list[int]:
    draw = random.Random(seed)
    if kind == "scattered":
        return draw.sample(range(1, COUNT), 30)
    if kind == "runs":
        return [*range(40, 50), 3, 5, *range(10, 22), 7]
    return draw.sample(range(1, COUNT), 2)


@pytest.mark.parametrize("orders", [(a, b) for a in LayoutOrder for b in LayoutOrder])
@pytest.mark.parametrize("kind", ["scattered", "runs", "two"])
@pytest.mark.parametrize("width", [6, 129, 2048])
def test_pages_of_every_size_and_pattern_arrive_and_nothing_else_changes(
    width: int, kind: str, orders: tuple[LayoutOrder, LayoutOrder]
) -> None:
    spec = spec_of(width)
    one, other, twin = (filled(PoolSet(spec, spec.even(COUNT), order=o), n) for n, o in enumerate((*orders, orders[1])))
    sources = some_pages(kind, 1)
    targets = [p + 5 for p in sources] if kind == "runs" else some_pages(kind, 2)
    twin.region.copy_(other.region)
    for block in blocks(one.layout.buffers["full"], other.layout.buffers["full"]):
        copy_block(block, one.region, COUNT, sources, other.region, COUNT, targets)
        stacks = (
            side.stack(pools.region, block.rows, COUNT, block.width, block.word)
            for side, pools in ((block.source, one), (block.target, twin))
        )
        copy_indexed(next(stacks), sources, next(stacks), targets)
    assert torch.equal(other.region, twin.region)
    assert [entry(other, "full", b) for b in targets] == [entry(one, "full", a) for a in sources]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_hold_every_byte_of_a_page_once(name: str) -> None:
    spec = pool_sets(4)[name]
    first, page = (PoolSet(spec, spec.even(5), order=o).layout for o in LayoutOrder)
    for pool in spec.by_name:
        for sides in ((first, first), (first, page), (page, first), (page, page)):
            found = blocks(sides[0].buffers[pool], sides[1].buffers[pool])
            assert sum(b.page_bytes for b in found) == spec.unit_bytes(pool)
        assert [(b.rows, b.width) for b in blocks(page.buffers[pool], packing(page, pool))] == [
            (1, spec.unit_bytes(pool))
        ], "a page-first page is one run of bytes"


def test_keys_and_values_are_one_block() -> None:
    layout = PoolSet(spec_of(64, layers=3), {"full": COUNT}).layout
    (block,) = blocks(layout.buffers["full"], packing(layout, "full"))
    assert (block.rows, block.width) == (6, 128)
    (block,) = blocks(layout.buffers["full"], packing(layout, "full"), range(1, 2))
    assert (block.rows, block.width) == (2, 128), "one layer of both"


def test_runs_are_the_longest_ones_and_the_rest_is_the_rest() -> None:
    found = runs([1, 2, 3, 4, 9, 11, 12, 13, 14, 15], [5, 6, 7, 8, 9, 1, 2, 3, 4, 9], at_least=4)
    assert found.long == [(0, 4), (5, 9)]
    assert found.rest.tolist() == [4, 9]
    assert runs([], at_least=4).rest.tolist() == []
    assert runs([7, 8], at_least=4).rest.tolist() == [0, 1]
    assert runs(range(9), at_least=4).long == [(0, 9)]


def test_gathering_into_used_memory_is_gathering() -> None:
    pools = filled(PoolSet(spec_of(6), {"full": COUNT}), 1)
    used = torch.full((3, pools.spec.page_bytes), 7, dtype=torch.uint8)
    assert gather(pools.region, pools.layout, "full", [5, 6, 2], used) is used
    assert torch.equal(used, gather(pools.region, pools.layout, "full", [5, 6, 2]))


@pytest.mark.parametrize("kind", ["scattered", "runs", "two"])
@pytest.mark.parametrize("width", [6, 8, 40_000])
@pytest.mark.parametrize("order", list(LayoutOrder))
def test_pages_are_digested_alike_whatever_is_digested_with_them(order: LayoutOrder, width: int, kind: str) -> None:
    pools = filled(PoolSet(spec_of(width, layers=1), {"full": COUNT}, order=order), 1)
    pages = some_pages(kind, 3)

    def digests(chosen: Sequence[int]) -> list[int]:
        firsts = [2 * page for page in chosen]
        return pools.digester.digest(pools.region, "full", chosen, firsts, [f + 2 for f in firsts])

    assert digests(pages) == [one for page in pages for one in digests([page])]
    canonical = gather(pools.region, pools.layout, "full", pages)
    firsts = [2 * page for page in pages]
    assert PageDigester(pools.layout).digest_canonical(canonical, "full", firsts, [f + 2 for f in firsts]) == digests(
        pages
    )


@pytest.mark.parametrize("word", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_numpy_sums_what_torch_sums(word: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    stack = torch.randint(256, (3, 9, 48 * word.itemsize), dtype=torch.uint8, generator=generator).view(word)
    coefficients = torch.randint(-(2**63), 2**63 - 1, (3, 12), generator=generator)
    for words in (stack, stack[:, 2:5], stack[:, ::2]):
        assert torch.equal(sum_by_numpy(words, word, coefficients, 4), sum_by_torch(words, word, coefficients, 4))


def test_a_state_slot_is_digested_whole_where_its_position_is() -> None:
    spec = pool_sets(4)["full+state"]
    pools = filled(PoolSet(spec, spec.even(5)), 1)
    assert all(b.index is IndexSpace.SLOT for b in spec.by_name["state"].buffers)
    seen = {pools.digester.digest(pools.region, "state", [2], [at], [end])[0] for at, end in pairwise((7, 8, 9))}
    assert len(seen) == 2
    assert pools.digester.digest(pools.region, "state", [2], [7], [7]) == pools.digester.digest(
        pools.region, "state", [2], [7], [8]
    )
