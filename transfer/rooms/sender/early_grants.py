"""Early grants: grants and aborts of one reader for rooms whose requests have not come yet, bounded.

Decode may hear of a request first, grant its room, and even give it up, before the router's message reaches prefill.
"""

from __future__ import annotations

from collections import OrderedDict

from twinpool.contracts.ids import RoomId
from twinpool.transfer.rooms import room_messages as m

_EARLY = 4096
"""Grants and aborts of one peer that are kept for requests which have not come yet."""
_EARLY_PLACES = 2**20
"""Places that the early grants of one peer may name, together."""


class EarlyGrants:
    """Grants of one reader, oldest first, and the rooms that it gave up before their requests came."""

    def __init__(self) -> None:
        self.grants: OrderedDict[RoomId, m.PageGrant] = OrderedDict()
        self.places = 0
        """Number of places that the grants name, together."""
        self.given_up: OrderedDict[RoomId, None] = OrderedDict()

    def take(self, room: RoomId) -> m.PageGrant | None:
        """Remove and return the grant of `room`; None where there is none."""
        grant = self.grants.pop(room, None)
        if grant is not None:
            self.places -= _places(grant)
        return grant

    def keep(self, grant: m.PageGrant) -> list[m.PageGrant]:
        """Keep `grant`, in place of an older one of its room. Returns the oldest, dropped where there are too many."""
        self.take(grant.room)
        self.grants[grant.room] = grant
        self.places += _places(grant)
        dropped = []
        while len(self.grants) > _EARLY or self.places > _EARLY_PLACES:
            oldest = self.grants[next(iter(self.grants))]
            self.take(oldest.room)
            dropped.append(oldest)
        return dropped

    def give_up(self, room: RoomId) -> None:
        """Record that decode gave `room` up: it is not to be opened any more."""
        self.given_up[room] = None
        while len(self.given_up) > _EARLY:
            self.given_up.popitem(last=False)


def _places(grant: m.PageGrant) -> int:
    return sum(len(place.indices) for place in grant.places)
