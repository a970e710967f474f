"""The memory of a holder table: its arrays, one after the other in one buffer of a fixed size.

The buffer is a process's own, or memory that one process writes and others map read-only. Such memory has no file: what
lies at its path is a link to the writer's descriptor, made when the header is complete. So nothing is left when the
writer and its readers have ended, however they ended.

**Slots** say which incarnation of which worker each number stands for, and whether its blocks are known. The list lies
in the table's memory. One version guards all of it, as it changes with the workers alone (odd while it is
being changed, as in `router.kv_indexer.holder_table`). A slot is *live* while all that its worker holds is known.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.router.kv_indexer.holder_sets import MAX_SLOTS
from twinpool.router.state.worker_table import WorkerKey

WAYS = 8
"""Entries of a bucket."""
ENTRY_BYTES = 20
"""Bytes of an entry: its key, its holders, its stamp."""
STRIPES = 4096
"""Version numbers: each guards a run of neighbouring buckets."""
NAME_BYTES = 64
"""The longest name of a worker, in UTF-8."""

MAGIC = 0x3154_5244_4C48_5754
"""Says what the file is, and the version of its layout."""

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("buckets", "<u8"),
        ("slots", "<u8"),
        ("rows", "<u8"),
        ("pulse", "<f8"),
        ("entries", "<u8"),
        ("evicted", "<u8"),
        ("crowded", "<u8"),
        ("slots_version", "<u8"),
        ("page_tokens", "<u8"),
    ]
)
SLOT = np.dtype([("name", f"S{NAME_BYTES}"), ("incarnation", "<u8"), ("used", "u1"), ("live", "u1")])


@dataclass(frozen=True, slots=True)
class TableSize:
    """Numbers of buckets, of slots for workers (a multiple of 8), and of rows of holders."""

    buckets: int
    slots: int = 4096
    rows: int = 4096

    def __post_init__(self) -> None:
        assert 0 < self.buckets < 2**32, "a bucket is chosen by 32 bits of a key"
        assert 0 < self.slots <= MAX_SLOTS, "a lane names a slot"
        assert self.slots % 8 == 0, "bitmaps are whole bytes"
        assert self.rows > 0

    @classmethod
    def of_bytes(cls, at_most: int) -> TableSize:
        """Return the largest table of the usual slots and rows whose entries take at most so many bytes."""
        return cls(max(1, at_most // (WAYS * ENTRY_BYTES)))

    @property
    def entries(self) -> int:
        """Blocks that fit, at most."""
        return self.buckets * WAYS

    @property
    def bytes(self) -> int:
        return sum(length for _, _, length in _arrays(self).values())


def _arrays(size: TableSize) -> dict[str, tuple[np.dtype[np.void] | type, tuple[int, ...], int]]:
    """Return dtype, shape and bytes of each array, in the order of the buffer; all begin at multiples of 64 bytes."""
    shapes: dict[str, tuple[np.dtype[np.void] | type, tuple[int, ...]]] = {
        "header": (HEADER, (1,)),
        "versions": (np.uint64, (min(STRIPES, size.buckets),)),
        "slots": (SLOT, (size.slots,)),
        "rows": (np.uint8, (size.rows, 2, size.slots // 8)),
        "stamps": (np.uint32, (size.buckets, WAYS)),
        "keys": (np.uint64, (size.buckets, WAYS)),
        "holders": (np.uint64, (size.buckets, WAYS)),
    }
    found = {}
    for name, (dtype, shape) in shapes.items():
        plain = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found[name] = (dtype, shape, -(-plain // 64) * 64)
    return found


class TableMemory:
    """The arrays of one table. `header` has one element; `keys` and `holders` are uint64 (buckets, `WAYS`), `stamps`
    uint32 of the same shape, `versions` uint64 (stripes,), `rows` uint8 (rows, 2, slots / 8)."""

    def __init__(self, buffer: memoryview | mmap.mmap | NDArray[np.uint8], size: TableSize) -> None:
        self.size = size
        self._buffer = buffer
        arrays: dict[str, NDArray[Any]] = {}
        at = 0
        for name, (dtype, shape, length) in _arrays(size).items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(buffer, dtype, count, at).reshape(shape)
            at += length
        self.header: NDArray[np.void] = arrays["header"]
        self.versions: NDArray[np.uint64] = arrays["versions"]
        self.slots: NDArray[np.void] = arrays["slots"]
        self.rows: NDArray[np.uint8] = arrays["rows"]
        self.stamps: NDArray[np.uint32] = arrays["stamps"]
        self.keys: NDArray[np.uint64] = arrays["keys"]
        self.holders: NDArray[np.uint64] = arrays["holders"]
        self.stripe_shift = max(0, (-(-size.buckets // len(self.versions)) - 1).bit_length())
        """A bucket's version is that of the stripe ``bucket >> stripe_shift``."""

    @classmethod
    def private(cls, size: TableSize) -> TableMemory:
        """Return memory of this process alone, all zero; pages that are never touched take none."""
        memory = cls(np.zeros(size.bytes, np.uint8), size)
        memory._describe(0)
        return memory

    @classmethod
    def create(cls, path: Path, size: TableSize, page_tokens: int) -> TableMemory:
        """Make a new table at `path`, in the place of one that may be there, which those who have mapped it keep.

        `page_tokens`: tokens of a page of the workers. Others can open it while this process lives. Raises `OSError`.
        """
        descriptor = os.memfd_create(path.name)  # Open as long as this process lives: it is the file.
        os.truncate(descriptor, size.bytes)
        memory = cls(mmap.mmap(descriptor, size.bytes), size)
        memory._describe(page_tokens)
        link = path.with_name(f"{path.name}.{os.getpid()}")
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        link.replace(path)
        return memory

    @classmethod
    def open(cls, path: Path) -> TableMemory:
        """Map a table read-only. Raises `OSError` where there is none, and `ValueError` for a file that isn't one."""
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) < HEADER.itemsize:
            raise ValueError(f"{path} is too short for a table")
        header = np.frombuffer(mapped, HEADER, 1)[0]
        if header["magic"] != MAGIC:
            raise ValueError(f"{path} isn't a table of this build")
        try:
            size = TableSize(int(header["buckets"]), int(header["slots"]), int(header["rows"]))
        except AssertionError as error:
            raise ValueError(f"{path} isn't a table of this build: {error}") from None
        if size.bytes != len(mapped):
            raise ValueError(f"{path} has {len(mapped)} bytes, its table {size.bytes}")
        return cls(mapped, size)

    @property
    def page_tokens(self) -> int:
        return int(self.header["page_tokens"][0])

    def _describe(self, page_tokens: int) -> None:
        self.header["buckets"], self.header["slots"], self.header["rows"] = (
            self.size.buckets,
            self.size.slots,
            self.size.rows,
        )
        self.header["page_tokens"] = page_tokens
        self.header["magic"] = MAGIC


STORAGE = 0
"""The slot of storage, which all workers share."""


class SlotWriter:
    """The writer's side."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._free = list(reversed(range(STORAGE + 1, memory.size.slots)))
        self._left: list[int] = []

    def take(self, worker: WorkerKey) -> int | None:
        """Return a slot for a worker, not live yet; None where none is free or the name is too long."""
        name = worker[0].encode()
        if not self._free or len(name) > NAME_BYTES:
            return None
        slot = self._free.pop()
        self._set(slot, name, worker[1], used=1)
        return slot

    def leave(self, slot: int) -> None:
        """Take a slot from its worker. It is free again once its blocks are out of the table (`swept`)."""
        self._set(slot, b"", Incarnation(0), used=0)
        self._left.append(slot)

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def left(self) -> list[int]:
        """Slots that no worker has any more and whose blocks may still be in the table."""
        return self._left

    def swept(self) -> None:
        """Note that no block names the slots in `left` any more."""
        self._free += self._left
        self._left = []

    def set_live(self, slot: int, live: bool) -> None:
        self._memory.slots["live"][slot] = live

    def _set(self, slot: int, name: bytes, incarnation: Incarnation, used: int) -> None:
        version, slots = self._memory.header["slots_version"], self._memory.slots
        version[0] += 1
        slots["live"][slot] = 0
        slots["name"][slot], slots["incarnation"][slot], slots["used"][slot] = name, incarnation, used
        version[0] += 1


@dataclass(frozen=True, slots=True)
class SlotList:
    """The slots as they were at one version."""

    version: int
    workers: Mapping[WorkerKey, int]


class SlotReader:
    """The readers' side."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._last = SlotList(-1, {})

    def read(self) -> SlotList | None:
        """Return the slots as they are now; None while they are being changed."""
        before = self.version
        if before == self._last.version:
            return self._last
        slots = self._memory.slots.copy()
        if before % 2 or self.version != before:
            return None
        used = np.flatnonzero(slots["used"])
        workers = {
            (WorkerName(bytes(slots["name"][at]).decode()), Incarnation(int(slots["incarnation"][at]))): at
            for at in used.tolist()
        }
        self._last = SlotList(before, workers)
        return self._last

    @property
    def version(self) -> int:
        return int(self._memory.header["slots_version"][0])

    @property
    def live(self) -> NDArray[np.bool_]:
        """Which slots are live: (slots,)."""
        live: NDArray[np.bool_] = self._memory.slots["live"] != 0
        return live
