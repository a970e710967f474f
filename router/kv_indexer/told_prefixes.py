"""Told prefixes: what workers hold as their KV events say, from the index process's table, mapped read-only.

The table is believed while its pulse is fresh: the index process writes the time there, by the machine's monotonic
clock, each round of its loop. A router that finds no table, or one without a pulse, goes on with what it has sent, and
looks for the table again once a second. A new index process makes a new file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinpool.router.kv_indexer.holder_table import HeldDepths, HolderReader
from twinpool.router.kv_indexer.table_memory import TableMemory
from twinpool.router.kv_indexer.table_slots import STORAGE, SlotList, SlotReader
from twinpool.router.state.prefix_hashes import PrefixHashes
from twinpool.router.state.router_log import log

PULSE_S = 2.0
"""Seconds without a pulse after which the table isn't believed."""
LOOK_S = 1.0
"""Seconds between two looks for a new table."""
TRIES = 4
"""How often a question is asked again because slots changed meanwhile."""


class ToldPrefix(NamedTuple):
    """What the index says of one prompt, in positions by slot: int32 (slots,)."""

    depths: HeldDepths
    live: NDArray[np.bool_]
    """Which slots are known in full."""
    slots: SlotList
    storage: int
    """Positions that storage holds."""


class ToldPrefixes:
    """Follows the table at `path`. Times are seconds of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that is mapped."""
        self._reader: HolderReader | None = None
        self._slots: SlotReader | None = None
        self._look_at = float("-inf")

    @property
    def memory(self) -> TableMemory | None:
        """The table that is mapped."""
        return self._reader.memory if self._reader is not None else None

    def fresh(self, now: float) -> bool:
        """Whether there is a table that is believed."""
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()
        memory = self.memory
        return memory is not None and now - float(memory.header["pulse"][0]) <= PULSE_S

    def find(self, hashes: PrefixHashes, now: float) -> ToldPrefix | None:
        """Return what is known of a prompt; None where no table is believed, or it changes too fast to be read."""
        if not self.fresh(now):
            return None
        assert self._reader is not None, "a fresh table is mapped"
        assert self._slots is not None, "a fresh table is mapped"
        if self._reader.memory.page_tokens != hashes.page_tokens:
            return None
        for _ in range(TRIES):
            slots, live = self._slots.read(), self._slots.live
            depths = self._reader.find(*hashes.asked_marks)
            if slots is not None and self._slots.version == slots.version:
                return ToldPrefix(depths, live, slots, int(depths.held[STORAGE]))
        return None

    def _look(self) -> None:
        try:
            found = os.stat(self._path)
            if self._file == (found.st_dev, found.st_ino):
                return
            memory = TableMemory.open(self._path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log("KV index not read", path=str(self._path), reason=str(error))
            return
        self._file = (found.st_dev, found.st_ino)
        self._reader, self._slots = HolderReader(memory), SlotReader(memory)
