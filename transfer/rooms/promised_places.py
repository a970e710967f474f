"""Promised places: which places of one reader its rooms may still write, so that none is granted to two of them."""

from __future__ import annotations

from collections.abc import Collection

from contracts.errors import WireError
from transfer.planes.data_plane import RoomTarget
from transfer.rooms import room_messages as m

_MOST_POSITIONS = 2**40


class PromisedPlaces:
    """Places of one reader, by pool, where it can't take them back; where it can, nothing is promised."""

    def __init__(self, pools: Collection[str], revocable: bool) -> None:
        """`pools`: names of those there are. `revocable`: whether the reader can take its places back."""
        self._pools, self._revocable = pools, revocable
        self.places: dict[str, set[int]] = {}

    def check(self, grant: m.PageGrant) -> None:
        """Raises `WireError` for places that can't be, or that are promised to another room."""
        if len({place.pool for place in grant.places}) != len(grant.places):
            raise WireError(f"room {grant.room} was granted places of one pool twice")
        for place in grant.places:
            if place.pool not in self._pools:
                raise WireError(
                    f"room {grant.room} was granted places of {place.pool!r:.80}, not {sorted(self._pools)}"
                )
            indices = set(place.indices)
            fit = 0 < len(indices) == len(place.indices) == len(place.epochs) and min(indices) > 0
            if not fit or not 0 <= place.first < _MOST_POSITIONS:
                raise WireError(f"room {grant.room} was granted places of {place.pool} that can't be: {place!r:.200}")
            if not indices.isdisjoint(self.places.get(place.pool, ())):
                raise WireError(f"room {grant.room} was granted places of {place.pool} that another room has")
        if grant.ticket <= 0 or grant.slot < 0:
            raise WireError(f"room {grant.room} was granted without a slot, or without a ticket")

    def promise(self, target: RoomTarget) -> None:
        """A room may write to `target` from now on."""
        if not self._revocable:
            for pool, run in target.runs.items():
                self.places.setdefault(pool, set()).update(run.indices)

    def take_back(self, target: RoomTarget) -> None:
        """Nothing more is posted to `target`. What was is complete before the reader hears that it may use its places
        again."""
        for pool, run in target.runs.items():
            self.places.get(pool, set()).difference_update(run.indices)
