"""The tier set: host memory and storage below a worker's device, the parts that copy pages between tiers, KV events.

`TierSet.build` decides once which tiers there are. For a tier that a worker doesn't have there is a stand-in, which
answers like a real tier that holds nothing, so callers need not ask: a worker without host memory has no backup, load
back, prefetch, swap storage nor arena; one without storage neither prefetch nor swap storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from twinpool.cache.arena.arena import Arena
from twinpool.cache.arena.arena_keeper import ArenaKeeper
from twinpool.cache.device.device_port import Completion, Device
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TokenPrefix, TreeNode
from twinpool.cache.storage.io_queue import IoQueue
from twinpool.cache.storage.page_store import PageStore, RankPageStore
from twinpool.cache.swap.swap_storage import SwappedState, SwapStorage
from twinpool.cache.tiers.backup import HostBackup
from twinpool.cache.tiers.kv_event_publisher import KVEventRecorder
from twinpool.cache.tiers.load_back import LoadBack
from twinpool.cache.tiers.prefetch import Prefetcher, PrefetchRequest
from twinpool.contracts.config.cache_config import CacheConfig


@dataclass(frozen=True)
class LowerTiers:
    """What a worker has below its device. Without host memory the rest of it is of no use."""

    host: PoolSet | None = None
    storage: IoQueue | None = None
    page_store: PageStore | None = None
    """Storage of a worker of several ranks, besides `storage`."""
    fingerprint: str = ""
    """Of all that a page's content depends on: a part of the names of objects in `storage`."""
    arena: Arena | None = None
    """The memory that `host` lies in, if it outlives this process."""


NO_TIERS = LowerTiers()


@dataclass(frozen=True)
class TierSet:
    """The tiers below one prefix tree. `host` is None without host memory; the tiers below are absent too then."""

    tree: RadixTree
    host: PoolSet | None
    backup: HostBackup | NoBackup
    load_back: LoadBack | NoLoadBack
    prefetcher: Prefetcher | NoPrefetcher
    swap_storage: SwapStorage | NoSwapStorage
    keeper: ArenaKeeper | NoArena
    events: KVEventRecorder | NoEvents
    storage: IoQueue | PageStore | None
    """The storage whose threads read and write for the other tiers; `close` ends them."""

    @classmethod
    def build(
        cls,
        tree: RadixTree,
        pools: PoolSet,
        device: Device,
        config: CacheConfig,
        now: Callable[[], float],
        below: LowerTiers,
        events: KVEventRecorder | NoEvents,
    ) -> TierSet:
        """Build the tiers that `below` allows; the others are absent. `now` is in seconds."""
        host, page_store, arena = below.host, below.page_store, below.arena
        if page_store is None and below.storage is not None and host is not None:
            page_store = RankPageStore(below.storage, host, below.fingerprint)
        storage = page_store or below.storage
        if host is None:
            nothing = NoBackup(), NoLoadBack(), NoPrefetcher(), NoSwapStorage(), NoArena()
            return cls(tree, None, *nothing, events, storage)
        backup = HostBackup(tree, pools, host, device, page_store, config.copy_chunk_bytes, now, config.storage.retry_s)
        keeper = ArenaKeeper(tree, host, arena, device, now) if arena is not None else NoArena()
        load_back = LoadBack(tree, pools, host, device, now, config.verify, keeper)
        prefetcher: Prefetcher | NoPrefetcher = NoPrefetcher()
        swap_storage: SwapStorage | NoSwapStorage = NoSwapStorage()
        if page_store is not None:
            prefetcher = Prefetcher(tree, host, page_store, config.prefetch, now, backup)
            swap_storage = SwapStorage(host, page_store, backup.lease)
        return cls(tree, host, backup, load_back, prefetcher, swap_storage, keeper, events, storage)

    def poll(self, *, idle: bool) -> None:
        """Take in completed operations of all tiers but load back (its `poll` comes last, from the manager).

        `idle`: no allocation is open.
        """
        self.events.round()
        self.backup.poll()
        self.prefetcher.poll()
        self.swap_storage.poll()
        self.keeper.poll(idle)

    @property
    def busy(self) -> bool:
        """Whether copies, loads or reads are under way that `poll` is to take in."""
        return bool(self.backup.busy or self.load_back.busy or len(self.prefetcher) or self.swap_storage.busy)

    @property
    def locks(self) -> int:
        """Locks in the tree that copies under way hold."""
        return self.backup.locks + self.load_back.locks + self.prefetcher.locks

    def stats(self) -> dict[str, float]:
        """Counters of what happened in the tiers, and how full they are."""
        out: dict[str, float] = {}
        for tier in (self.backup, self.load_back, self.prefetcher, self.swap_storage, self.keeper):
            out |= tier.counters
        if self.host is not None:
            accounts = self.tree.accounts
            allocator = self.host.allocators[self.tree.full]
            out |= {"stores_missed": accounts.missed, "stores_waiting": len(accounts.unstored)}
            out |= {"host_pages_total": allocator.total, "host_pages_used": allocator.total - allocator.free}
        return out

    def check(self, swapped: Callable[[str], int]) -> list[str]:
        """Return a line for each account of the host that doesn't add up.

        `swapped` returns how many host pages (or slots) of a pool swapped out requests hold.
        """
        if self.host is None:
            return []
        held = {
            pool: self.tree.accounts.sizes[Tier.HOST, pool]
            + self.backup.leased(pool)
            + self.prefetcher.leased(pool)
            + swapped(pool)
            for pool in self.host.allocators
        }
        return [
            *self.host.check(),
            *self.backup.check(),
            *unaccounted(self.host, held, "host"),
            *self.keeper.check(),
            *self.prefetcher.check(),
        ]

    def close(self, timeout_s: float) -> bool:
        """End the threads of storage and KV events; storage operations under way get `timeout_s` seconds.

        Returns False where a storage thread may still write to host memory: this memory must outlive the thread, and
        nothing of it may be freed then.
        """
        self.events.close()
        return self.storage is None or self.storage.close(timeout_s)


def unaccounted(pools: PoolSet, held: Mapping[str, int], tier: str = "") -> list[str]:
    """Return a line for each pool where the number in use isn't `held`; `tier` is a word for these lines."""
    found = []
    for pool, allocator in pools.allocators.items():
        used = allocator.total - allocator.free - allocator.quarantined
        if used != held[pool]:
            name = f"{tier} {pool}" if tier else pool
            found.append(f"{name} pages: {used} in use, {held[pool]} accounted for")
    return found


# ---------------------------------------------------------------- stand-ins for absent tiers

_NOTHING: Mapping[str, float] = MappingProxyType({})


class NoBackup:
    """The backup of a worker without host memory: it copies nothing down."""

    counters = _NOTHING
    busy = False
    locks = 0

    def save(self, nodes: Iterable[TreeNode]) -> bool:
        return False

    def leased(self, component: str) -> int:
        return 0

    def poll(self) -> None:
        pass

    def check(self) -> list[str]:
        return []


class NoLoadBack:
    """The load back of a worker without host memory: it finds nothing to load."""

    counters = _NOTHING
    busy = False
    locks = 0
    nbytes = 0
    bytes_per_s = 0.0

    def missing(self, lock: NodeLock) -> list[NodePart]:
        return []

    def plan(self, lock: NodeLock, leases: dict[str, Lease]) -> None:
        assert not leases, "there is nothing to load from"

    def launch(self) -> None:
        pass

    def under_way(self, lock: NodeLock) -> bool:
        return False

    def completions(self, lock: NodeLock) -> list[Completion]:
        return []

    def poll(self) -> list[NodeLock]:
        return []


class NoPrefetcher:
    """The prefetcher of a worker without storage: it reads nothing, and no request waits for it."""

    counters = _NOTHING
    locks = 0

    def __len__(self) -> int:
        return 0

    def start(self, prefix: TokenPrefix, owner: str = "") -> PrefetchRequest | None:
        return None

    def may_run(self, prefetch: PrefetchRequest) -> bool:
        return True

    def deadline(self, prefetch: PrefetchRequest) -> float | None:
        return None

    def release(self, prefetch: PrefetchRequest) -> None:
        pass

    def leased(self, component: str) -> int:
        return 0

    def poll(self) -> None:
        pass

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class NoSwapStorage:
    """The swap storage of a worker without storage: it takes nothing."""

    counters = _NOTHING
    busy = False

    def takes(self, swapped: SwappedState) -> bool:
        return False

    def store(self, swapped: SwappedState, keys: Sequence[bytes]) -> None:
        raise AssertionError("there is no storage to put it on")

    def fetch(self, swapped: SwappedState, keys: Sequence[bytes]) -> None:
        raise AssertionError("there is no storage to fetch it from")

    def poll(self) -> None:
        pass


class NoArena:
    """The arena keeper of a worker whose host memory ends with its process: nothing to take over or to check."""

    counters = _NOTHING
    bond = b""

    def take_copies(self) -> int:
        return 0

    def adopt(self, unfinished: bool = False) -> int:
        return 0

    def begin(self, bond: bytes) -> None:
        pass

    def seal_swapped(self, swapped: SwappedState) -> None:
        pass

    def unproven(self, part: NodePart) -> bool:
        return False

    def proved(self, part: NodePart) -> None:
        pass

    def torn(self, part: NodePart, count: int) -> bool:
        return False

    def poll(self, idle: bool) -> None:
        pass

    def check(self) -> list[str]:
        return []


class NoEvents:
    """The KV events of a worker that publishes none."""

    endpoint = replay_endpoint = ""

    def round(self) -> None:
        pass

    def close(self) -> None:
        pass
