"""Moves and tags, over registries of several shapes."""

import pytest
import torch

from cache.moves import copy_pages, gather_pages, scatter_pages
from cache.pools import PoolSet
from cache.registry import BufferSpec, PoolSetLayout, PoolSetSpec, PoolSpec
from cache.tags import Digester, chain_keys


def spec(page_tokens: int, dtype: torch.dtype = torch.bfloat16, dim: int = 12) -> PoolSetSpec:
    """K and V, and a third buffer of another shape: nothing may depend on there being two."""
    return PoolSetSpec(
        page_tokens,
        (
            PoolSpec(
                "full",
                (
                    BufferSpec("k", 3, (2, dim), dtype),
                    BufferSpec("v", 3, (2, dim), dtype),
                    BufferSpec("index_k", 2, (5,), torch.uint8),
                ),
            ),
        ),
    )


def filled(pools: PoolSet, seed: int) -> PoolSet:
    generator = torch.Generator().manual_seed(seed)
    pools.region.copy_(torch.randint(256, (len(pools.region),), dtype=torch.uint8, generator=generator))
    return pools


def state(pools: PoolSet, page: int) -> list[torch.Tensor]:
    views = []
    for buffers in pools.layout.buffers.values():
        for buffer in buffers:
            for layer in range(buffer.spec.layers):
                views.append(pools.layout.view(pools.region, buffer, layer)[page].view(torch.uint8).clone())
    return views


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_a3_a_copy_carries_every_buffer_of_the_registry_and_nothing_else(page_tokens: int) -> None:
    source, target = filled(PoolSet(spec(page_tokens), 9), 1), filled(PoolSet(spec(page_tokens), 13), 2)
    before = [state(target, page) for page in range(13)]
    moved = {12: 3, 5: 8, 1: 1}
    size = copy_pages(
        source.region, source.layout, list(moved.values()), target.region, target.layout, list(moved.keys())
    )
    assert size == 3 * source.layout.spec.page_bytes
    for page in range(13):
        want = state(source, moved[page]) if page in moved else before[page]
        assert all(map(torch.equal, state(target, page), want)), page


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_gathered_pages_scatter_back_to_the_same_bytes(page_tokens: int) -> None:
    source, target = filled(PoolSet(spec(page_tokens), 9), 1), PoolSet(spec(page_tokens), 5)
    packed = gather_pages(source.region, source.layout, [7, 2])
    assert packed.shape == (2, source.layout.spec.page_bytes)
    scatter_pages(packed, target.region, target.layout, [1, 4])
    assert all(map(torch.equal, state(target, 4), state(source, 2)))
    assert all(map(torch.equal, state(target, 1), state(source, 7)))
    assert target.check() == []


def test_check_sees_a_written_null_page() -> None:
    pools = PoolSet(spec(4), 5)
    assert pools.check() == []
    pools.gates["full"].layer(1)["v"][0, 0, 0, 0] = 1.0
    assert pools.check() == ["full pages: the null page of v isn't zero in layers [1]"]


def digest(pools: PoolSet, pages: list[int], positions: int) -> list[int]:
    size = pools.layout.spec.page_tokens
    firsts = [i * size for i in range(len(pages))]
    ends = [min(first + size, positions) for first in firsts]
    return Digester(pools.layout).digest(pools.region, pages, firsts, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [12, 16, 3])
def test_every_single_byte_of_a_page_is_in_its_digest(dtype: torch.dtype, dim: int) -> None:
    pools = filled(PoolSet(spec(2, dtype, dim), 4), 3)
    (clean,) = digest(pools, [2], 2)
    for buffers in pools.layout.buffers.values():
        for buffer in buffers:
            for layer in range(buffer.spec.layers):
                start = buffer.offset(layer, 2)
                for offset in range(start, start + buffer.page_stride):
                    pools.region[offset] ^= 1
                    assert digest(pools, [2], 2) != [clean]
                    pools.region[offset] ^= 1
    assert digest(pools, [2], 2) == [clean]


def test_digests_add_up_over_page_sizes() -> None:
    small, large = filled(PoolSet(spec(4), 9), 5), PoolSet(spec(16), 3)
    for buffers in large.layout.buffers.values():
        for buffer in buffers:
            twin = next(b for b in small.layout.buffers["full"] if b.spec == buffer.spec)
            for layer in range(buffer.spec.layers):
                pieces = small.layout.view(small.region, twin, layer)[[3, 1, 8, 6]]
                view = large.layout.view(large.region, buffer, layer)
                view[2] = pieces.reshape(view[2].shape)
    assert digest(large, [2], 16) == [sum(digest(small, [3, 1, 8, 6], 16)) % 2**64]
    assert digest(large, [2], 11) == [sum(digest(small, [3, 1, 8, 6], 11)) % 2**64]


def test_a_digest_tells_positions_layers_and_buffers_apart() -> None:
    pools = PoolSet(spec(4), 4)
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
    one, other = chain_keys([1, 2, 3, 4, 5], 2), chain_keys([9, 2, 3, 4, 5], 2)
    assert len(one) == 3
    assert not set(one) & set(other)
    assert chain_keys([1, 2, 3, 4], 2) == one[:2]
    assert not set(chain_keys([1, 2], 2, "salt")) & set(one)
    assert chain_keys([1, 2, 3, 4, 5, 6], 2)[2] != one[2], "a partly filled page has a key of its own"


def test_layouts_account_for_every_byte() -> None:
    layout = PoolSetLayout(spec(4), 7)
    assert layout.spec.page_bytes == 4 * (2 * 3 * 2 * 12 * 2 + 2 * 5)
    assert layout.nbytes >= 7 * layout.spec.page_bytes
