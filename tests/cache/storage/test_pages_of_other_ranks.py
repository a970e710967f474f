"""What one tensor-parallel size has stored, every other one reads: the same bytes, checked by the same digests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolKind, PoolSetLayout, PoolSetSpec, PoolSpec
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.cache.storage.object_slices import AssembledPage, HeadPart, ObjectSlicer, PageObjects

PAGES = 3
TOKENS = 4
FIRSTS, ENDS = [0, 4, 8], [4, 8, 10]
"""The last page is filled half."""


def whole() -> dict[str, PoolSetSpec]:
    """Pool sets of one rank that holds everything; `heads` says what other sizes slice."""
    k, v = (BufferSpec(n, 2, (8, 6), torch.bfloat16, heads=8) for n in "kv")
    few = BufferSpec("k", 2, (2, 6), torch.float16, heads=2)
    latent = BufferSpec("latent", 2, (1, 20), torch.bfloat16)
    index = BufferSpec("index_k", 1, (TOKENS * 12,), torch.uint8, IndexSpace.PAGE)
    window = PoolSpec("window", (BufferSpec("wk", 1, (4, 3), torch.float32, heads=4),), PoolKind.WINDOW, 9)
    conv = BufferSpec("conv", 2, (5, 3), torch.bfloat16, IndexSpace.SLOT)
    channels = BufferSpec("channels", 2, (24,), torch.int16, IndexSpace.SLOT, heads=24)
    recurrent = BufferSpec("recurrent", 2, (8, 4, 2), torch.float32, IndexSpace.SLOT, heads=8)
    state = PoolSpec("state", (conv, recurrent, channels), PoolKind.STATE)
    sets = {
        "full": (PoolSpec("full", (k, v)),),
        "few heads": (PoolSpec("full", (few,)),),
        "nothing sliced": (PoolSpec("full", (latent, index)),),
        "both kinds": (PoolSpec("full", (k, index, v, latent)),),
        "full+window": (PoolSpec("full", (k, v)), window),
        "all": (PoolSpec("full", (latent, k, index)), window, state),
    }
    return {name: PoolSetSpec(TOKENS, pools) for name, pools in sets.items()}


NAMES = tuple(whole())


def sliced(buffer: BufferSpec, size: int, rank: int) -> BufferSpec:
    """The buffer on a rank of `size`; with fewer heads than ranks, several ranks hold the same ones."""
    if not buffer.heads:
        return buffer
    parts = min(size, buffer.heads)
    count = buffer.heads // parts
    shape = (count, *buffer.shape[1:])
    return dataclasses.replace(buffer, shape=shape, first_head=rank * parts // size * count)


def rank_spec(spec: PoolSetSpec, size: int, rank: int) -> PoolSetSpec:
    pools = tuple(dataclasses.replace(p, buffers=tuple(sliced(b, size, rank) for b in p.buffers)) for p in spec.pools)
    return PoolSetSpec(spec.page_tokens, pools)


def pages_of(spec: PoolSetSpec, pool: str) -> torch.Tensor:
    """A rank's canonical pages, cut by plain indexing from noise that is a function of the buffer's name."""
    columns = []
    for buffer in spec.by_name[pool].buffers:
        heads = buffer.heads or buffer.shape[0]
        tokens = TOKENS if buffer.index is IndexSpace.TOKEN else 1
        inner = int(np.prod(buffer.shape[1:])) * buffer.dtype.itemsize
        noise = np.random.default_rng(sum(buffer.name.encode()) + len(pool))
        everything = noise.integers(256, size=(PAGES, buffer.layers, tokens, heads, inner), dtype=np.uint8)
        columns.append(everything[:, :, :, buffer.first_head :][:, :, :, : buffer.shape[0]].reshape(PAGES, -1))
    return torch.from_numpy(np.concatenate(columns, axis=1))


def sealed(spec: PoolSetSpec, pool: str, pages: torch.Tensor) -> list[int]:
    return PageDigester(PoolSetLayout(spec, spec.even(1))).digest_canonical(pages, pool, FIRSTS, ENDS)


def written(spec: PoolSetSpec, size: int, pool: str) -> dict[HeadPart, PageObjects]:
    """What all ranks of a writer of `size` store of one pool."""
    store: dict[HeadPart, PageObjects] = {}
    for rank in range(size):
        mine = rank_spec(spec, size, rank)
        slicer, pages = ObjectSlicer(mine), pages_of(mine, pool)
        for one in slicer.split(pool, pages, sealed(mine, pool, pages), FIRSTS, ENDS):
            assert one.payloads.shape == (PAGES, slicer.object_bytes(pool, one.part))
            twin = store.setdefault(one.part, one)
            assert (twin.digests, twin.payloads.tolist()) == (one.digests, one.payloads.tolist())
    return store


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_what_one_size_wrote_every_size_reads(name: str, size: int) -> None:
    spec = whole()[name]
    for pool in spec.by_name:
        store = written(spec, size, pool)
        assert sum(o.payloads.shape[1] for o in store.values()) == spec.unit_bytes(pool), "every byte is stored once"
        sums = [sum(d) % 2**64 for d in zip(*(o.digests for o in store.values()), strict=True)]
        assert sums == sealed(spec, pool, pages_of(spec, pool)), "digests add up, each buffer counted once"
        for readers in (1, 2, 4):
            for rank in range(readers):
                mine = rank_spec(spec, readers, rank)
                want = pages_of(mine, pool)
                slicer = ObjectSlicer(mine)
                stored = [plan for plan in slicer.plans(pool) if set(plan) <= set(store)]
                assert stored
                for plan in stored:
                    got = slicer.assemble(pool, [store[part] for part in plan], FIRSTS, ENDS)
                    assert torch.equal(got.pages, want)
                    assert list(got.digests) == sealed(mine, pool, want)
                    assert not got.damaged


def test_a_rank_reads_its_own_object_first_and_otherwise_what_covers_it() -> None:
    slicer = ObjectSlicer(rank_spec(whole()["both kinds"], 2, 1))
    assert [[str(part) for part in plan] for plan in slicer.plans("full", (1, 2, 4, 8, 16))] == [
        ["shared", "1of2"],
        ["shared", "2of4", "3of4"],
        ["shared", "4of8", "5of8", "6of8", "7of8"],
        ["shared", "0of1"],
    ]
    assert ObjectSlicer(whole()["nothing sliced"]).plans("full") == [(HeadPart(0, 0),)]
    assert ObjectSlicer(rank_spec(whole()["few heads"], 4, 3)).plans("full", (1, 2, 4)) == [
        (HeadPart(1, 2),),
        (HeadPart(0, 1),),
    ]


def damaged(slicer: ObjectSlicer, store: dict[HeadPart, PageObjects], of: int) -> AssembledPage:
    return slicer.assemble("full", [store[part] for part in slicer.plan("full", of)], FIRSTS, ENDS)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 2), (2, 2), (4, 2), (4, 1)])
def test_a_damaged_byte_is_found_in_every_object_and_page_that_is_read(writers: int, readers: int) -> None:
    spec = whole()["both kinds"]
    store = written(spec, writers, "full")
    slicer = ObjectSlicer(rank_spec(spec, readers, readers - 1))
    for part in slicer.plan("full", writers):
        payloads = store[part].payloads
        for at in (0, payloads.shape[1] // 2, payloads.shape[1] - 1):
            for page in (0, 1):
                payloads[page, at] ^= 1
                assert damaged(slicer, store, writers).damaged == {page: (part,)}
                payloads[page, at] ^= 1
    assert not damaged(slicer, store, writers).damaged


def test_all_damaged_objects_of_a_page_are_named() -> None:
    spec = whole()["both kinds"]
    store, slicer = written(spec, 2, "full"), ObjectSlicer(spec)
    parts = slicer.plan("full", 2)
    assert len(parts) == 3
    for part in parts[::2]:
        store[part].payloads[1, 0] ^= 1
    assert damaged(slicer, store, 2).damaged == {1: parts[::2]}


def test_what_was_damaged_before_it_was_cut_stays_visible() -> None:
    spec = whole()["both kinds"]
    slicer, pages = ObjectSlicer(spec), pages_of(spec, "full")
    digests = sealed(spec, "full", pages)
    for at in (0, pages.shape[1] - 1):
        hurt = pages.clone()
        hurt[1, at] ^= 1
        objects = slicer.split("full", hurt, digests, FIRSTS, ENDS)
        assert set(slicer.assemble("full", objects, FIRSTS, ENDS).damaged) == {1}


def test_objects_that_do_not_cover_the_page_are_refused() -> None:
    spec = whole()["full"]
    store = written(spec, 2, "full")
    with pytest.raises(ValueError, match="1of2 don't make up a page of 0of1"):
        ObjectSlicer(spec).assemble("full", [store[HeadPart(1, 2)]], FIRSTS, ENDS)


def test_slices_that_are_no_equal_parts_are_refused() -> None:
    uneven = BufferSpec("k", 1, (3, 6), torch.float16, heads=8, first_head=1)
    with pytest.raises(ValueError, match=r"heads 1\.\.3 of 8 of k aren't one of equal parts"):
        ObjectSlicer(PoolSetSpec(TOKENS, (PoolSpec("full", (uneven,)),)))
    half = BufferSpec("k", 1, (4, 6), torch.float16, heads=8)
    quarter = BufferSpec("v", 1, (2, 6), torch.float16, heads=8)
    with pytest.raises(ValueError, match="0of2, 0of4"):
        ObjectSlicer(PoolSetSpec(TOKENS, (PoolSpec("full", (half, quarter)),)))
