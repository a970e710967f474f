"""Pool sets of every kind of model, declared by the tests: small, and with odd sizes on purpose."""

from __future__ import annotations

import random

import torch

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, LayoutOrder, PoolKind, PoolSetSpec, PoolSpec
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.sim.fabric.hash_answers import STATE_PLACES

WINDOW_TOKENS = 9
"""Reaches 8 positions back: two pages of 4."""


def _full(dim: int = 12) -> PoolSpec:
    return PoolSpec(
        "full", (BufferSpec("k", 3, (2, dim), torch.bfloat16), BufferSpec("v", 3, (2, dim), torch.bfloat16))
    )


def _sparse(page_tokens: int) -> PoolSpec:
    """Latent KV by token; index keys and their scales stored page by page: all keys, then all scales."""
    latent = BufferSpec("latent", 2, (1, 20), torch.bfloat16)
    return PoolSpec(
        "full", (latent, BufferSpec("index_k", 2, (page_tokens * (8 + 4),), torch.uint8, index=IndexSpace.PAGE))
    )


def _window() -> PoolSpec:
    buffers = tuple(BufferSpec(name, 2, (2, 6), torch.float32) for name in ("window_k", "window_v"))
    return PoolSpec("window", buffers, PoolKind.WINDOW, WINDOW_TOKENS)


def _state() -> PoolSpec:
    conv = BufferSpec("conv", 2, (STATE_PLACES, 3), torch.bfloat16, index=IndexSpace.SLOT)
    recurrent = BufferSpec("recurrent", 2, (STATE_PLACES, 2, 4), torch.float32, index=IndexSpace.SLOT)
    return PoolSpec("state", (conv, recurrent), PoolKind.STATE)


def pool_sets(page_tokens: int = 4) -> dict[str, PoolSetSpec]:
    return {
        "full": PoolSetSpec(page_tokens, (_full(),)),
        "sparse": PoolSetSpec(page_tokens, (_sparse(page_tokens),)),
        "full+window": PoolSetSpec(page_tokens, (_full(), _window())),
        "full+state": PoolSetSpec(page_tokens, (_full(), _state())),
        "all": PoolSetSpec(page_tokens, (_sparse(page_tokens), _window(), _state())),
    }


NAMES = tuple(pool_sets())


def filled(pools: PoolSet, seed: int) -> PoolSet:
    """Random bytes everywhere, the null pages included."""
    generator = torch.Generator().manual_seed(seed)
    pools.region.copy_(torch.randint(256, (len(pools.region),), dtype=torch.uint8, generator=generator))
    return pools


def worn(pools: PoolSet, seed: int | str) -> PoolSet:
    """As after a long life: pages and slots are handed out in no order, and in another one in each pool and place. So a
    number of one side is hardly ever that of the other side, and who asks with the wrong one is found out."""
    for name, allocator in pools.allocators.items():
        random.Random(f"{seed} {name}").shuffle(free_list(allocator))
    return pools


def free_list(allocator: PageAllocator) -> list[int]:
    """The free indices, the next one last; the allocator's own list, for tests that break it."""
    return allocator._free


def entry(pools: PoolSet, pool: str, index: int) -> list[bytes]:
    """The bytes of one page or slot, buffer by buffer and layer by layer."""
    out = []
    for buffer in pools.layout.buffers[pool]:
        for layer in range(buffer.spec.layers):
            start = buffer.offset(layer, index)
            out.append(pools.region[start : start + buffer.entry_bytes].numpy().tobytes())
    return out


def host_pools(spec: PoolSetSpec, count: int) -> PoolSet:
    return PoolSet(spec, spec.even(count), order=LayoutOrder.PAGE_FIRST, tier="host")
