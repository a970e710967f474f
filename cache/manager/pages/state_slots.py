"""State slots: recurrent states of requests are put into working slots, and copied aside at page boundaries.

All these copies are on the stream of the forward passes, so that accesses to a slot keep the order of launches.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.cache.allocation.allocation import Allocation, StateSnapshot
from twinpool.cache.device.device_port import DEVICE, Completion, Device, DeviceOp, DeviceStream, PageSpanUse, attempt
from twinpool.cache.manager.pages.load_planner import LoadPlanner
from twinpool.cache.manager.pages.page_supply import PageSupply
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.memory.page_moves import PageMove, PoolMove
from twinpool.cache.pool.in_flight import InFlightPins
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.tree_node import Tier

SNAPSHOTS = 2
"""The most snapshots of a request that aren't in the tree yet: a further one replaces the oldest."""


class StateSlots:
    """Fills and copies slots of the state pools; without such pools its methods do nothing."""

    def __init__(
        self,
        pools: PoolSet,
        kinds: PoolKinds,
        device: Device,
        supply: PageSupply,
        planner: LoadPlanner,
        in_flight: InFlightPins,
    ) -> None:
        self._pools, self._kinds, self._device = pools, kinds, device
        self._supply, self._planner, self._in_flight = supply, planner, in_flight

    @property
    def stateful(self) -> bool:
        """Whether requests have recurrent states, of which snapshots are wanted at page boundaries."""
        return bool(self._kinds.states)

    def start_all(self, allocation: Allocation) -> None:
        """Begin to fill all working slots of the allocation."""
        for pool in self._kinds.states:
            self.start(allocation, pool)

    def start(self, allocation: Allocation, pool: str) -> None:
        """Begin to fill the working slot of `pool`: with the tree's snapshot at the allocation's depth, or with zeros.

        A device error shows in `Allocation.start_failed`.
        """
        (slot,) = allocation.slots[pool].indices
        snapshots = [p for p in allocation.lock.of(pool) if p.tier is Tier.DEVICE]
        if not snapshots:
            op = DeviceOp("zero slot", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, pool, (slot,)),))
            allocation.started.append(attempt(self._device, op, lambda: self._pools.zero({pool: (slot,)})))
            return
        after = self._planner.completions(allocation)
        allocation.started.append(self._copy(pool, snapshots[0].lease.indices[0], slot, after))

    def snapshot(self, allocation: Allocation, committed: int) -> bool:
        """Copy the recurrent states aside, as they are after `committed` positions (whole pages).

        Steps must have been launched up to `committed` and no further. Returns False without a free slot in every
        state pool; nothing happens then.
        """
        assert committed % self._pools.spec.page_tokens == 0, "snapshots are taken at page boundaries"
        needs = dict.fromkeys(self._kinds.states, 1)
        leases = self._supply.lease_all(needs, f"snapshot of {allocation.owner}")
        if leases is None:
            return False
        for pool, lease in leases.items():
            copied = self._copy(pool, allocation.slots[pool].indices[0], lease.indices[0])
            held = allocation.snapshots.setdefault(pool, [])
            held.append(StateSnapshot(committed // self._pools.spec.page_tokens, lease, copied))
            while len(held) > SNAPSHOTS:
                self._give_back(held.pop(0))
        return True

    def _give_back(self, snapshot: StateSnapshot) -> None:
        if not snapshot.completion.done:
            self._in_flight.hold(snapshot.completion, snapshot.lease.pin("snapshot under way"))
        snapshot.lease.release()

    def _copy(self, pool: str, source: int, target: int, after: Sequence[Completion] = ()) -> Completion:
        op = DeviceOp(
            "copy slot",
            DeviceStream.COMPUTE,
            (PageSpanUse(DEVICE, pool, (source,)),),
            (PageSpanUse(DEVICE, pool, (target,)),),
        )
        move = PageMove((PoolMove(pool, (source,), (target,)),))
        return attempt(self._device, op, lambda: self._pools.copy(move, self._pools), after)
