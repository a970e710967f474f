"""The page allocator: leases that own pages and slots, and pins that delay the reuse of released ones.

An index (a page, a slot) is in exactly one of three places:

    free ----lease()----> leased ----release()----> quarantine ----last pin gone----> free
                                        \\___________ no pins ___________________/

`release()` bumps the index's epoch, so a block table made under the old lease is stale from that moment on. A *pin*
says that an operation which names the index may still touch it: a launched forward pass, a copy, a remote writer
that has the memory mapped. Released indices with a pin wait in quarantine: an epoch stops no writer, and only the pin's
owner knows when the last access is over.

Every lease is released once, apart from all others: `release()` is idempotent. Parts of a lease go to another owner by
`split`, and are given back by `cut`.

Epochs are counted on the host and read by kernels. A block table carries the epochs that its pages had when they were
leased. A step compares them with this table, in the order of its stream: so it sees every page freed before it was
launched, and none freed after.

The host is ahead of the device. A caller that frees pages while an operation that names them is under way pins the
pages first and leaves the pins with `InFlightPins`, which releases them when the operation is complete, not before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinpool.cache.device.device_copies import upload_packed
from twinpool.cache.device.device_port import Completion
from twinpool.contracts.errors import CapacityError, StaleLease
from twinpool.contracts.ids import Epoch, LeaseId


class Lease:
    """Ownership of some indices of one allocator, until `release`.

    Cutting off the end costs what is cut, not what stays: `count` shrinks at once, the stored indices when next read.
    """

    __slots__ = ("_allocator", "_epochs", "_indices", "count", "id", "owner")

    def __init__(self, allocator: PageAllocator, lease_id: LeaseId, owner: str, indices: tuple[int, ...]) -> None:
        self._allocator = allocator
        self.id = lease_id
        self.owner = owner
        self.count = len(indices)
        self._indices = indices
        self._epochs = allocator.epochs.of(indices)

    def __len__(self) -> int:
        return self.count

    @property
    def indices(self) -> tuple[int, ...]:
        if len(self._indices) != self.count:
            self._trim()
        return self._indices

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        if len(self._indices) != self.count:
            self._trim()
        return self._epochs

    def _trim(self) -> None:
        self._indices, self._epochs = self._indices[: self.count], self._epochs[: self.count]

    def _take(self, run: slice) -> tuple[int, ...]:
        """Remove the indices at `run` from the lease, and return them."""
        taken = self._indices[run]
        if run.stop == self.count:
            self.count = run.start
            if 2 * self.count < len(self._indices):
                self._trim()
        else:
            indices, epochs = self.indices, self.epochs
            self._indices = indices[: run.start] + indices[run.stop :]
            self._epochs = epochs[: run.start] + epochs[run.stop :]
            self.count = len(self._indices)
        return taken

    @property
    def live(self) -> bool:
        return self._allocator.holds(self)

    def require(self) -> None:
        """Raises `StaleLease` once the lease has been released."""
        if not self.live:
            raise StaleLease(f"{self._allocator.name} lease {self.id} of {self.owner} has ended")

    def split(self, count: int, owner: str, *, start: int = 0) -> Lease:
        """Hand `count` indices from `start` on to a new lease of `owner`; this one keeps the rest."""
        return self._allocator.split(self, slice(start, start + count), owner)

    def cut(self, count: int) -> None:
        """Keep the first `count` indices, and give the others back."""
        self._allocator.cut(self, count)

    def pin(self, reason: str) -> Pin:
        return self._allocator.pin(self.indices, reason)

    def release(self) -> None:
        self._allocator.release(self)


def joined(leases: Sequence[Lease]) -> tuple[list[int], list[Epoch]]:
    """Indices and epochs of all `leases`, one lease after the other."""
    indices, epochs = list[int](), list[Epoch]()
    for lease in leases:
        if len(lease._indices) != lease.count:
            lease._trim()
        indices += lease._indices
        epochs += lease._epochs
    return indices, epochs


class Pin:
    """Keeps released indices out of the free list until `release`: an operation may still touch them."""

    def __init__(self, allocator: PageAllocator, reason: str, indices: tuple[int, ...]) -> None:
        self._allocator = allocator
        self.reason = reason
        self.indices = indices
        self.held = True

    def release(self) -> None:
        if self.held:
            self.held = False
            self._allocator.unpin(self)


def _tell_nobody(indices: Sequence[int]) -> None:
    """The observer of releases until `observe_releases` sets one."""


class PageAllocator:
    """Hands out the indices `first .. size-1` of one pool: at first the lowest, later the last freed first."""

    def __init__(self, name: str, size: int, *, first: int = 0) -> None:
        self.name = name
        self.size = size
        self._first = first
        self._free = list(range(size - 1, first - 1, -1))
        self.epochs = EpochTable(size)
        """The epoch table that steps compare their block tables with."""
        self._epochs = self.epochs.counts
        self._leases: dict[LeaseId, Lease] = {}
        self._pins: set[Pin] = set()
        self._pinned = np.zeros(size, dtype=np.int32)
        self._quarantined: set[int] = set()
        self._next_id = 1
        self._tell_released: Callable[[Sequence[int]], None] = _tell_nobody

    def observe_releases(self, tell: Callable[[Sequence[int]], None]) -> None:
        """Call `tell` with indices that are given back, before they can be leased again. One observer at most."""
        assert self._tell_released is _tell_nobody
        self._tell_released = tell

    @property
    def total(self) -> int:
        """Indices that can be leased at all."""
        return self.size - self._first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def quarantined(self) -> int:
        """Indices that were released while pinned and still wait for their last pin."""
        return len(self._quarantined)

    def lease(self, count: int, owner: str) -> Lease:
        """Take `count` indices. Raises `CapacityError`, having taken none, when fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"{count} {self.name} wanted by {owner}, {len(self._free)} of {self.total} free")
        taken = tuple(self._free[len(self._free) - count :][::-1]) if count else ()
        del self._free[len(self._free) - count :]
        return self._grant(owner, taken)

    def take(self, runs: Sequence[Sequence[int]], owner: str) -> list[Lease]:
        """Lease exactly these indices, one lease for each of `runs`.

        Raises `CapacityError`, having taken none, where an index isn't free or is named twice.
        """
        wanted = {index for run in runs for index in run}
        if len(wanted) != sum(map(len, runs)) or not wanted.issubset(self._free):
            raise CapacityError(f"{self.name} {owner} wants aren't all free")
        self._free = [index for index in self._free if index not in wanted]
        return [self._grant(owner, tuple(run)) for run in runs]

    def holds(self, lease: Lease) -> bool:
        """Whether `lease` hasn't ended. Its epochs are current then: only giving back bumps them (`check` verifies)."""
        return self._leases.get(lease.id) is lease

    def split(self, lease: Lease, run: slice, owner: str) -> Lease:
        lease.require()
        if not 0 <= run.start <= run.stop <= len(lease):
            raise ValueError(f"can't split {run.start}..{run.stop} off a lease of {len(lease)}")
        return self._grant(owner, lease._take(run))

    def cut(self, lease: Lease, count: int) -> None:
        """Give back all of `lease` but its first `count` indices."""
        lease.require()
        if not 0 <= count <= len(lease):
            raise ValueError(f"can't keep {count} of a lease of {len(lease)}")
        self._return(lease._take(slice(count, len(lease))))

    def join(self, leases: Sequence[Lease], owner: str) -> Lease:
        """Return one lease of all indices of `leases`, in their order, which ends `leases`; epochs stay as they are."""
        for lease in leases:
            lease.require()
        joined = self._grant(owner, tuple(i for lease in leases for i in lease.indices))
        for lease in leases:
            del self._leases[lease.id]
        return joined

    def release(self, lease: Lease) -> None:
        if self._leases.pop(lease.id, None) is None:
            return
        self._return(lease.indices)

    def _return(self, indices: tuple[int, ...]) -> None:
        self.epochs.bump(indices)
        self._tell_released(indices)
        returned = indices[::-1]
        if self._pins:
            pinned = [i for i in returned if self._pinned[i]]
            self._quarantined.update(pinned)
            returned = tuple(i for i in returned if not self._pinned[i]) if pinned else returned
        self._free.extend(returned)

    def pin(self, indices: Sequence[int], reason: str) -> Pin:
        pin = Pin(self, reason, tuple(indices))
        self._pins.add(pin)
        np.add.at(self._pinned, np.asarray(pin.indices, dtype=np.int64), 1)
        return pin

    def unpin(self, pin: Pin) -> None:
        self._pins.remove(pin)
        np.subtract.at(self._pinned, np.asarray(pin.indices, dtype=np.int64), 1)
        if self._quarantined:
            back = dict.fromkeys(i for i in pin.indices if i in self._quarantined and not self._pinned[i])
            self._quarantined.difference_update(back)
            self._free.extend(back)

    def check(self) -> list[str]:
        """Recount everything from the leases and pins; returns a line for each fault."""
        found = [] if self._each_once() else self._miscounted()
        pinned = Counter(index for pin in self._pins for index in pin.indices)
        if pinned != {int(i): int(self._pinned[i]) for i in self._pinned.nonzero()[0]}:
            found.append(f"{self.name}: pin counts differ from the pins")
        found += [
            f"{self.name}: {index} is in quarantine without a pin" for index in self._quarantined if not pinned[index]
        ]
        return found

    def _each_once(self) -> bool:
        """Whether every index has one holder, and every lease its epochs: one pass for the usual case."""
        leased = [index for lease in self._leases.values() for index in lease.indices]
        epochs = [epoch for lease in self._leases.values() for epoch in lease.epochs]
        if sorted([*leased, *self._free, *self._quarantined]) != list(range(self._first, self.size)):
            return False
        return list(self.epochs.of(leased)) == epochs

    def _miscounted(self) -> list[str]:
        """A line for each index without exactly one holder, with the holders' names, and each lease with old epochs."""
        found: list[str] = []
        owners: dict[int, list[str]] = {}
        for lease in self._leases.values():
            for index in lease.indices:
                owners.setdefault(index, []).append(lease.owner)
            if self.epochs.of(lease.indices) != lease.epochs:
                found.append(f"{self.name}: lease {lease.id} of {lease.owner} has an old epoch")
        for index in self._free:
            owners.setdefault(index, []).append("the free list")
        for index in self._quarantined:
            owners.setdefault(index, []).append("quarantine")
        for index in range(self._first, self.size):
            holders = owners.pop(index, [])
            if len(holders) != 1:
                found.append(f"{self.name}: {index} belongs to {' and '.join(holders) or 'nobody'}")
        found += [f"{self.name}: {index} is out of range, held by {' and '.join(o)}" for index, o in owners.items()]
        return found

    def _grant(self, owner: str, indices: tuple[int, ...]) -> Lease:
        lease = Lease(self, LeaseId(self._next_id), owner, indices)
        self._next_id += 1
        self._leases[lease.id] = lease
        return lease


_MAX_BUMPED = 4096
"""The most releases kept one by one until the device's copy of the table is updated; more are merged."""
_FEW = 32
"""The most pages that are looked up one by one: for so few, numpy's overhead costs more than the look-ups."""


class EpochTable:
    """The epochs of one pool, int32 [size]. A CPU reads the host's table; a GPU has a copy that steps update."""

    def __init__(self, size: int) -> None:
        self.host = torch.zeros(size, dtype=torch.int32)
        self.counts = self.host.numpy()
        """The same memory as a numpy array, for counting."""
        self._one_by_one: Any = self.counts.data
        """The same memory as a memoryview, for few pages at a time."""
        self.releases = 0
        """How often pages were released: as long as it doesn't change, no epoch does."""
        self._copy: torch.Tensor | None = None
        self._bumped: list[Sequence[int]] = []

    def bump(self, indices: Sequence[int]) -> None:
        """Count one more release of these pages, each named once."""
        self.releases += 1
        if len(indices) <= _FEW:
            counts = self._one_by_one
            for index in indices:
                counts[index] += 1
        else:
            self.counts[np.asarray(indices, dtype=np.int64)] += 1
        if self._copy is not None:
            self._bumped.append(indices)
            if len(self._bumped) > _MAX_BUMPED:
                # Pages come and go while no step reads the table.
                self._bumped = [np.unique(np.concatenate(self._bumped)).tolist()]

    def of(self, indices: Sequence[int]) -> tuple[Epoch, ...]:
        """The epochs of these pages."""
        if len(indices) <= _FEW:
            counts = self._one_by_one
            return tuple([counts[index] for index in indices])
        return tuple(self.counts[np.asarray(indices, dtype=np.int64)].tolist())

    def look_up(self, pages: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int32]:
        """The epochs of pages in any arrangement, such as many block tables side by side."""
        return self.counts.take(pages)

    def on(self, device: torch.device) -> torch.Tensor:
        """The table, up to date, on `device`; to be called from within an operation, always on the same stream. The
        host doesn't wait for what that stream runs."""
        return self.host if device.type == "cpu" else self.copy_on(device)

    def copy_on(self, device: torch.device) -> torch.Tensor:
        """The table's copy on `device`, always the same one, brought up to date."""
        if self._copy is None:
            (self._copy,) = upload_packed([self.counts], device)
        elif self._bumped:
            freed = np.unique(np.concatenate(self._bumped)).astype(np.int64, copy=False)
            self._bumped.clear()
            freed_k, counts_k = upload_packed([freed, self.look_up(freed)], device)
            self._copy.index_copy_(0, freed_k, counts_k)
        return self._copy


class InFlightPins:
    """Pins by the operation that they wait for. Call `sweep` now and then, and `settle` before closing."""

    def __init__(self) -> None:
        self._held: deque[tuple[Completion, Sequence[Pin]]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, completion: Completion, *pins: Pin) -> None:
        """Keep `pins` until `completion` is done; without pins, only ask `done` of it until it is."""
        self._held.append((completion, pins))

    def sweep(self) -> None:
        """Release the pins of complete operations; never waits."""
        for _ in range(len(self._held)):
            completion, pins = self._held.popleft()
            if completion.done:
                for pin in pins:
                    pin.release()
            else:
                self._held.append((completion, pins))

    def settle(self) -> None:
        """Wait for all operations and release all pins; then raises the first operation's error, if any failed."""
        failed: Exception | None = None
        while self._held:
            completion, pins = self._held.popleft()
            try:
                completion.wait()
            except Exception as error:
                failed = failed or error
            for pin in pins:
                pin.release()
        if failed is not None:
            raise failed
