"""Recent prefixes: which blocks this router sent to which workers in the last seconds.

No event confirms these yet, so every choice of a prefill worker asks for them, and every prompt that is placed is
entered. They are few and nobody else reads them: a dictionary of Python's answers in the time that a lookup in arrays
takes to begin. The holders of a block are the bits of one number, which blocks of one prompt share.

There are two halves, which take turns: what is sent goes into the younger one, and the older one is emptied when it has
been there for long enough, or when the younger one is full.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

RECENT_S = 10.0
"""Seconds for which a prompt that was sent counts as there, whatever the worker's events say; at most twice as long."""
RECENT_BLOCKS = 200_000
"""Blocks of a half, of some 100 bytes each: beyond it, what was sent counts as there for a shorter time."""


class RecentPrefixes:
    """What was sent to each slot lately. Times are seconds of the router core's clock."""

    def __init__(self, slots: int, blocks: int = RECENT_BLOCKS) -> None:
        """`slots`: how many there are; `blocks`: the most of each half."""
        assert blocks > 0
        self._slots, self._most = slots, blocks
        self._halves: list[dict[int, int]] = [{}, {}]
        """The younger first: the slots that were sent a block, as bits, by its key."""
        self._turned = 0.0
        """When the halves took turns last."""

    def __len__(self) -> int:
        return sum(map(len, self._halves))

    def sent(self, slot: int, blocks: NDArray[np.uint64], now: float) -> None:
        """Enter a prompt's blocks, in order, that go to a slot."""
        self._turn(now)
        keys: list[int] = blocks[-self._most :].tolist()
        half, bit = self._halves[0], 1 << slot
        if not keys or half.get(keys[-1], 0) & bit:
            return  # Who was sent a prompt's last block was sent all of it.
        if len(half) + len(keys) > self._most:
            self._halves.reverse()
            half = self._halves[0]
            half.clear()
            self._turned = now
        more: dict[int, int] = {}
        """By the holders of a block those that it has with this slot: one number for all blocks with the same."""
        for key in keys:
            holders = half.get(key)
            if holders is None:
                half[key] = bit
            else:
                if holders not in more:
                    more[holders] = holders | bit
                half[key] = more[holders]

    def find(self, blocks: NDArray[np.uint64], ends: NDArray[np.int32], now: float) -> NDArray[np.int32]:
        """Return how many positions of a prompt each slot was sent: int32 (slots,). `blocks`: some of its blocks, in
        order; `ends`: the positions where they end."""
        self._turn(now)
        found = np.zeros(self._slots, np.int32)
        keys, depths = blocks[::-1].tolist(), ends[::-1].tolist()
        for half in self._halves:
            met = 0
            for key, depth in zip(keys, depths, strict=True) if half else ():
                # From the deepest on, so that a slot counts where it is met for the first time.
                if (holders := half.get(key)) is not None and (new := holders & ~met):
                    met |= new
                    if new & (new - 1):
                        bits = np.frombuffer(new.to_bytes(-(-self._slots // 8), "little"), np.uint8)
                        there = np.unpackbits(bits, count=self._slots, bitorder="little")
                        np.maximum(found, there * np.int32(depth), out=found)
                    else:
                        slot = new.bit_length() - 1
                        found[slot] = max(found[slot], depth)
        return found

    def forget(self, slots: Collection[int]) -> None:
        """Take slots out of what was sent."""
        gone = sum(1 << slot for slot in set(slots))
        for half in self._halves:
            for key in [key for key, holders in half.items() if holders & gone]:
                if left := half[key] & ~gone:
                    half[key] = left
                else:
                    del half[key]

    def _turn(self, now: float) -> None:
        """Empty the older half when it is time to."""
        if now - self._turned >= RECENT_S:
            self._halves.reverse()
            for half in self._halves if now - self._turned >= 2 * RECENT_S else self._halves[:1]:
                half.clear()
            self._turned = now
