"""Promised places: the places of one reader that its rooms may still write, so that none is granted to two rooms."""

from __future__ import annotations

from collections.abc import Collection

from twinpool.contracts.errors import WireError
from twinpool.transfer.planes.data_plane import RoomTarget
from twinpool.transfer.rooms import room_messages as m

_MAX_POSITIONS = 2**40


class PromisedPlaces:
    """The promised places of one reader, by pool. On a revocable plane nothing is promised: it takes places back."""

    def __init__(self, pools: Collection[str], revocable: bool) -> None:
        """`pools`: the names of the pools. `revocable`: whether the reader can take its places back."""
        self._pools, self._revocable = pools, revocable
        self.places: dict[str, set[int]] = {}

    def check(self, grant: m.PageGrant) -> None:
        """Check a grant. Raises `WireError` for impossible or already promised places, or without slot or ticket."""
        if len({place.pool for place in grant.places}) != len(grant.places):
            raise WireError(f"room {grant.room} was granted places of one pool twice")
        for place in grant.places:
            if place.pool not in self._pools:
                raise WireError(
                    f"room {grant.room} was granted places of {place.pool!r:.80}, not {sorted(self._pools)}"
                )
            indices = set(place.indices)
            fit = 0 < len(indices) == len(place.indices) == len(place.epochs) and min(indices) > 0
            if not fit or not 0 <= place.first < _MAX_POSITIONS:
                raise WireError(f"room {grant.room} was granted places of {place.pool} that can't be: {place!r:.200}")
            if not indices.isdisjoint(self.places.get(place.pool, ())):
                raise WireError(f"room {grant.room} was granted places of {place.pool} that another room has")
        if grant.ticket <= 0 or grant.slot < 0:
            raise WireError(f"room {grant.room} was granted without a slot, or without a ticket")

    def promise(self, target: RoomTarget) -> None:
        """Record that a room may write to `target` from now on."""
        if not self._revocable:
            for pool, run in target.runs.items():
                self.places.setdefault(pool, set()).update(run.indices)

    def take_back(self, target: RoomTarget) -> None:
        """Forget the places of `target`: nothing more is posted to it. Posted writes are complete before the reader
        hears that it may use the places again."""
        for pool, run in target.runs.items():
            self.places.get(pool, set()).difference_update(run.indices)
