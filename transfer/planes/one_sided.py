"""One-sided planes: writers store by themselves, and the reader hears of it by notices alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.memory_layout import PoolSetLayout
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived
from twinpool.transfer.planes.data_plane import RoomTarget, said

MAX_COUNT = 2**40


class OneSidedPlane:
    """The part of `transfer.planes.data_plane.RankDataPlane` with nothing to do: no write passes through the reader's
    hands, so none can be permitted, revoked, or missing when its notice comes."""

    revocable = False

    def permit(self, target: RoomTarget) -> None: ...

    def revoke(self, room: RoomId) -> None: ...

    def poll_followers(self) -> None: ...

    def settled(self, rank: int, settled: WriteArrived) -> None: ...

    def take_settled(self) -> list[WriteArrived]:
        return []


def described_layout(kind: str, descriptor: Mapping[str, Any], spec: PoolSetSpec) -> PoolSetLayout:
    """The layout of a reader's memory, from its descriptor's counts. Raises `LayoutMismatch` for counts that can't
    be."""
    counts = said(descriptor, "counts", dict)
    most = {pool.name: counts.get(pool.name) for pool in spec.pools}
    if most != counts or not all(type(count) is int and 0 < count <= MAX_COUNT for count in most.values()):
        raise LayoutMismatch(f"plane {kind}: the reader's counts must be of {sorted(most)}, got {counts!r:.200}")
    return PoolSetLayout(spec, counts)


def no_notices(data: bytes) -> None:
    """The way of notices between ranks that aren't leaders: there is none."""
    raise AssertionError("only leaders give notice, to leaders")
