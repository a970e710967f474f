"""Ended rooms: which rooms are over, the last word about each, and which peers were told it; all of it bounded.

A last word is the message that ends a room. A room is used once, so both ends remember the rooms that have ended. A
last word may be lost with a connection: the peer that was told it is told again once the connection is back, and a peer
that asks about an ended room later gets the same word.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from twinpool.contracts.ids import RoomId

WordT = TypeVar("WordT")
_REMEMBERED = 65536
"""Ended rooms that are remembered; the oldest are forgotten first."""
_TOLD = 256
"""Last words to one peer that are kept to be sent again: the newest."""


class EndedRooms(Generic[WordT]):
    """Ended rooms of one end, oldest first. `WordT`: the type of that end's last word about a room."""

    def __init__(self) -> None:
        self._words: OrderedDict[RoomId, WordT | None] = OrderedDict()
        self._told: dict[Hashable, deque[RoomId]] = {}

    def __contains__(self, room: RoomId) -> bool:
        return room in self._words

    def remember(self, room: RoomId, word: WordT | None = None) -> None:
        """Record that `room` has ended. `word`: the last word about it; None where nothing needs to be sent again."""
        self._words[room] = word
        while len(self._words) > _REMEMBERED:
            self._words.popitem(last=False)

    def last_word(self, room: RoomId) -> WordT | None:
        """Return the last word about `room`; None where it has none, or the room isn't remembered."""
        return self._words.get(room)

    def told(self, peer: Hashable, room: RoomId) -> None:
        """Record that `peer` is told the last word about `room`."""
        self._told.setdefault(peer, deque(maxlen=_TOLD)).append(room)

    def resend_to(self, peer: Hashable) -> list[WordT]:
        """Return the last words that `peer` was told, in order, of rooms that are still remembered."""
        words = [self._words.get(room) for room in self._told.get(peer, ())]
        return [word for word in words if word is not None]

    def forget(self, peer: Hashable) -> None:
        """Forget what `peer` was told: nothing is sent to it again. The rooms stay remembered."""
        self._told.pop(peer, None)
