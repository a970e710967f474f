"""Ended rooms: which rooms are over, the last word about each, and which peers were told it; all of it bounded.

A room is used once, so both ends remember those that have ended. A last word may be lost with a connection: whoever was
told it is told again once the connection is back, and whoever asks about an ended room later hears the same word.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from contracts.ids import RoomId

WordT = TypeVar("WordT")
_REMEMBERED = 65536
"""Rooms that are remembered."""
_TOLD = 256
"""The latest words that one peer was told, which are said again."""


class EndedRooms(Generic[WordT]):
    """Ended rooms of one end, oldest first. `WordT`: what that end says last about a room."""

    def __init__(self) -> None:
        self._words: OrderedDict[RoomId, WordT | None] = OrderedDict()
        self._told: dict[Hashable, deque[RoomId]] = {}

    def __contains__(self, room: RoomId) -> bool:
        return room in self._words

    def remember(self, room: RoomId, word: WordT | None = None) -> None:
        """`room` has ended. `word`: the last one about it; None where nothing needs to be said again."""
        self._words[room] = word
        while len(self._words) > _REMEMBERED:
            self._words.popitem(last=False)

    def last_word(self, room: RoomId) -> WordT | None:
        return self._words.get(room)

    def told(self, peer: Hashable, room: RoomId) -> None:
        """`peer` is told the last word about `room`."""
        self._told.setdefault(peer, deque(maxlen=_TOLD)).append(room)

    def resend_to(self, peer: Hashable) -> list[WordT]:
        """What `peer` was told last, in order; of rooms that are still remembered."""
        words = [self._words.get(room) for room in self._told.get(peer, ())]
        return [word for word in words if word is not None]

    def forget(self, peer: Hashable) -> None:
        """Nobody tells `peer` anything again. The rooms stay remembered."""
        self._told.pop(peer, None)
