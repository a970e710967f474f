"""Swap-out: the state of requests off the device to leased host memory, and on to storage if host memory is short.

    start        begin to copy the state of the committed positions, in every pool; the allocation may be freed at once
    settle       take in the end of the copy: check that every page is there and is what was sealed on the device
    to_storage   move the state on to storage, to free its host memory; `from_storage` fetches it back to the host
    drop         give back the host memory: the only end of swapped out state

`cache.swap.offload` makes the copies. Both ends are pinned until the copies are complete (A6), so the allocation can be
freed as soon as they are submitted; its pages wait in quarantine until no copy reads them any more. Digests are taken
from the device's bytes as they are copied, and compared with the seals that whole pages got when they were produced.
Nothing here waits. Host pages that only the tree holds are evicted for swapped out state, not the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinpool.cache.allocation.allocation import Allocation
from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.manager.swap.swap_pages import page_extent, same_parts
from twinpool.cache.manager.tier_set import TierSet
from twinpool.cache.memory.required_pages import due
from twinpool.cache.pool.in_flight import InFlightPins
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import Tier
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.swap.offload import offload
from twinpool.cache.swap.swapped_state import SwapEvent, SwappedState, SwapPlace
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import CapacityError


class SwapOut:
    """Swaps requests out, and owns their swapped out state until it is dropped."""

    def __init__(
        self,
        pools: PoolSet,
        kinds: PoolKinds,
        device: Device,
        tree: RadixTree,
        tiers: TierSet,
        in_flight: InFlightPins,
        config: CacheConfig,
    ) -> None:
        self._pools, self._kinds, self._device, self._tree = pools, kinds, device, tree
        self._tiers, self._in_flight = tiers, in_flight
        self._chunk_bytes, self._verify = config.copy_chunk_bytes, config.verify
        self._shares = config.load_back != "never"
        """Whether a swap-in may load pages of the tree's host tier: then a swap-out needn't copy them."""
        self._swapped: list[SwappedState] = []

    def __len__(self) -> int:
        """Requests with swapped out state that isn't dropped yet."""
        return len(self._swapped)

    def start(self, allocation: Allocation, prefix: TokenPrefix, committed: int) -> SwappedState:
        """Begin to copy the state of `committed` positions, whose whole pages are `prefix`, to host memory.

        Steps that name the allocation must have landed. The caller frees the allocation, at once if it likes.
        Raises `CapacityError` without enough host memory, and `RuntimeError` where the device refuses; nothing is
        taken then.
        """
        assert not allocation.released, "what was given back isn't kept"
        assert not allocation.invalid, "what can't be trusted isn't kept"
        host, full, spec = self._tiers.host, self._kinds.full, self._pools.spec
        if host is None:
            raise CapacityError("there is no host tier to swap out in: set cache.host_bytes")
        owner = f"swapped out {allocation.owner}"
        whole = committed // spec.page_tokens
        digests = {pool: _known(allocation.digests[pool], whole) for pool in self._kinds.paged}
        here = same_parts(self._tree, prefix, digests[full], Tier.HOST) if self._shares else []
        above = self._tree.locks.keep(here, owner)
        kept = sum(map(len, here))
        numbers = due(spec, committed)
        numbers[full] = range(kept, numbers[full].stop)
        numbers = {pool: chosen for pool, chosen in numbers.items() if chosen}
        taken = {pool: page_extent(spec, allocation, pool, chosen, committed) for pool, chosen in numbers.items()}
        try:
            self._make_room(host, {pool: len(extent) for pool, extent in taken.items()})
            saved = offload(
                self._device,
                self._pools,
                host,
                taken,
                chunk_bytes=self._chunk_bytes,
                owner=owner,
                verify=self._verify,
            )
        except (CapacityError, RuntimeError):
            self._tree.locks.unlock(above)
            raise
        swapped = SwappedState(
            allocation.owner, prefix, committed, allocation.pages, kept, above, numbers, saved, digests
        )
        self._swapped.append(swapped)
        return swapped

    def _make_room(self, host: PoolSet, needs: Mapping[str, int]) -> None:
        for pool, count in needs.items():
            lacking = count - host.allocators[pool].free
            if lacking > 0:
                self._tree.eviction.evict(Tier.HOST, pool, lacking)

    def settle(self, swapped: SwappedState) -> None:
        """Take in a copy that has ended: `place` becomes `HOST`, or `LOST` if a page is missing or not as sealed.

        Does nothing while the copy is under way.
        """
        if swapped.place is SwapPlace.SAVING and swapped.saved.done:
            if self._sound(swapped):
                swapped.turn(SwapEvent.SAVED)
                self._tiers.keeper.seal_swapped(swapped)
            else:
                swapped.turn(SwapEvent.FAILED)
                swapped.saved.release()

    def _sound(self, swapped: SwappedState) -> bool:
        if not swapped.saved.complete:
            return False
        sums = swapped.saved.digests
        if sums is None:
            return True
        whole = swapped.positions // self._pools.spec.page_tokens
        for pool in self._kinds.paged:
            sealed = swapped.digests[pool]
            found = dict(zip(swapped.numbers.get(pool, ()), sums.get(pool, ()), strict=True))
            bad = sorted(n for n in found.keys() & sealed.keys() if found[n] != sealed[n])
            if bad:
                swapped.damage[pool] = bad
                return False
            swapped.digests[pool] = sealed | {n: digest for n, digest in found.items() if n < whole}
        return True

    def to_storage(self, swapped: SwappedState, tokens: Sequence[int]) -> bool:
        """Begin to move the state on to storage, to free its host memory; `tokens` are those of its positions.

        Returns False without storage, without digests to verify the state by on the way back, or where storage has
        refused it before.
        """
        if not self._tiers.swap_storage.takes(swapped):
            return False
        self._tiers.swap_storage.store(swapped, self._keys(swapped, tokens))
        return True

    def from_storage(self, swapped: SwappedState, tokens: Sequence[int]) -> None:
        """Begin to fetch stored state back to the host; `tokens` as for `to_storage`.

        Raises `CapacityError` without room there, with nothing taken.
        """
        self._tiers.swap_storage.fetch(swapped, self._keys(swapped, tokens))

    def _keys(self, swapped: SwappedState, tokens: Sequence[int]) -> Sequence[bytes]:
        return block_hashes(tokens, self._pools.spec.page_tokens, swapped.prefix.salt)

    def drop(self, swapped: SwappedState) -> None:
        """Give back the host memory. Idempotent. Pages that an operation still touches are free once it has ended."""
        if swapped.place is SwapPlace.GONE:
            return
        swapped.turn(SwapEvent.DISCARD)
        self._swapped.remove(swapped)
        self._tree.locks.unlock(swapped.above)
        if not swapped.saved.done:
            self._in_flight.hold(swapped.saved)
        swapped.saved.release()

    def leased(self, pool: str) -> int:
        """Host pages (or slots) of `pool` that swapped out state holds."""
        return sum(swapped.leased(pool) for swapped in self._swapped)

    def check(self) -> list[str]:
        return [line for swapped in self._swapped for line in swapped.check()]


def _known(digests: Sequence[int | None], whole: int) -> dict[int, int]:
    return {n: digest for n, digest in enumerate(digests[:whole]) if digest is not None}
