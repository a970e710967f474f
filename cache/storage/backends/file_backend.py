"""The `file` backend: objects as files in a folder of this host, which any number of processes share.

`file_folder` keeps the folder consistent. A read is open, one `preadv` of payload and seal straight into the caller's
page, and a check. Nothing about single objects is kept in memory: a name is looked up in the file system each time, as
another process may have written or deleted the object in the meantime.

When a folder is opened, a thread scans it shard by shard: it counts objects, sweeps files of dead writers, and evicts
objects that are over the cap. No call waits for the thread; but in a folder without counts nothing is written until it
has scanned all shards. When room is short, the least recently used objects are evicted: in a folder of a few thousand
objects exactly these, in a larger one the oldest eighth of a shard, shard after shard, so that a write never looks at
all objects.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from twinpool.cache.storage.backends.file_folder import SHARDS, FolderBusy, ObjectFolder, ShardCounts, remove, shard_of
from twinpool.cache.storage.storage_backend import (
    CUT_OFF,
    KEPT,
    MISSING,
    STORED,
    BackendCapacity,
    BackendCounts,
    BackendTally,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    Payload,
    check_seal,
    seal,
    seal_bytes,
    wrong_size,
)
from twinpool.contracts.clock import Clock, SystemClock

WritePayloads = Callable[[int, Sequence[Payload]], int]
"""`os.writev`, or what a test puts in its place."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link or a pipe under an object's name must not be followed or waited for."""
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SLACK = 16
"""Evicting from a small folder frees this part of the cap (1/16) beyond what is needed, as each time costs a scan."""
_SMALL = 4096
"""The most objects of a small folder, all of which may be looked at at once."""
_OLDEST = 8
"""In a larger folder this part (1/8) of a shard's objects may be evicted at a time."""
_MAX_SHARDS = 32
"""Shards that are scanned, at most, to make room for one write."""


class FileBackend:
    """Objects under `root`, at most `max_bytes` with their seals.

    A call waits at most `timeout_s` for other processes, and begins no file after that. `wall_ns` gives the use times
    (None: the file system's own clock), `writev` writes. With `group`, the folder's group may read and write there.
    Raises `ConfigError` when the folder can't be used. The class has more than twenty methods: a third of them are the
    interface of a backend, the others their steps, which share the folder's lock and the call's deadline.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        timeout_s: float = 5.0,
        *,
        group: bool = False,
        clock: Clock | None = None,
        wall_ns: Callable[[], int] | None = None,
        writev: WritePayloads = os.writev,
    ) -> None:
        self._clock = clock or SystemClock()
        self._folder = ObjectFolder(root, self._clock, group)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._wall_ns, self._writev = wall_ns, writev
        self._tally = BackendTally()
        self._next_shard = random.randrange(SHARDS)
        self._closing, self._wanted, self._through = threading.Event(), threading.Event(), threading.Event()
        try:
            with self._folder.locked(self._deadline()):
                counted = self._folder.read_counts()
                if not counted.known and self._folder.empty:
                    counted.known = True
                    self._folder.write_counts(counted)
        except (FolderBusy, OSError):
            pass  # Without counts, nothing is written before the thread has counted.
        self._wanted.set()
        self._scanner = threading.Thread(target=self._scan_when_wanted, name="storage-scan", daemon=True)
        self._scanner.start()

    # ------------------------------------------------------------ counting

    def wait_counted(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until all shards have been scanned since the folder was opened; returns whether they
        have. Other calls needn't wait for that."""
        return self._through.wait(timeout_s)

    def _scan_when_wanted(self) -> None:
        while not self._closing.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while not self._closing.is_set() and not self.scan():
                self._closing.wait(self._timeout_s)
            self._through.set()

    def scan(self) -> bool:
        """Scan every shard, holding the lock for one at a time, then evict what is over the cap; returns whether all
        of that could be done."""
        foreign = 0
        try:
            for shard in range(SHARDS):
                if self._closing.is_set():
                    return False
                with self._folder.locked(self._deadline()):
                    found = self._folder.scan(shard, sweep=True)
                    counted = self._folder.read_counts()
                    counted.set(shard, found)
                    self._folder.write_counts(counted)
                foreign += found.foreign
            with self._folder.locked(self._deadline()):
                counted = self._folder.read_counts()
                counted.known = True
                self._folder.write_counts(counted)
                foreign += self._folder.tidy()
            while not self._closing.is_set() and self._too_much():
                pass
        except (FolderBusy, OSError):
            return False  # Another process keeps the lock, or the disk is full and refuses pages by itself.
        self._tally.add("foreign", foreign)
        return True

    def _too_much(self) -> bool:
        """Evict some of the objects that are over the cap; returns whether there are more that can be evicted."""
        with self._folder.locked(self._deadline()):
            counted = self._folder.read_counts()
            before = counted.used
            if before > self._max_bytes:
                self._make_room(counted, self._max_bytes, 0)
                self._folder.write_counts(counted)
            return self._max_bytes < counted.used < before

    def _deadline(self) -> float:
        return self._clock.now() + self._timeout_s

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        return [self._is_there(self._folder.path(name.key)) for name in names]

    @staticmethod
    def _is_there(path: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[ObjectOutcome]:
        deadline = self._deadline()
        outcomes = [self._read_one(name, buffer, deadline) for name, buffer in zip(names, into, strict=True)]
        bad = [name for name, outcome in zip(names, outcomes, strict=True) if outcome.verdict is ObjectVerdict.DAMAGED]
        if bad:
            self.delete(bad)
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _read_one(self, name: ObjectName, into: memoryview, deadline: float) -> ObjectOutcome:
        if self._clock.now() >= deadline:
            return _late()
        try:
            file = os.open(self._folder.path(name.key), _READ)
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                return self._foreign()
            return _failed(error)
        try:
            return self._read_open(file, name, into)
        except OSError as error:
            return _failed(error)
        finally:
            os.close(file)

    def _read_open(self, file: int, name: ObjectName, into: memoryview) -> ObjectOutcome:
        size, sealed = into.nbytes, seal_bytes(name)
        tail = bytearray(sealed + 1)  # The byte more shows a file that is too long.
        try:
            got = os.preadv(file, [into, tail], 0)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ESPIPE, errno.EINVAL):
                return self._foreign()
            raise
        if got != size + sealed:
            return wrong_size(os.fstat(file).st_size, size + sealed)
        outcome = check_seal(name, into, tail[:sealed])
        if outcome.verdict is ObjectVerdict.FOUND:
            self._use(file)
        return outcome

    def _use(self, file: int | str, *, follow_symlinks: bool = True) -> None:
        if self._wall_ns is None:
            os.utime(file, follow_symlinks=follow_symlinks)
        else:
            now = self._wall_ns()
            os.utime(file, ns=(now, now), follow_symlinks=follow_symlinks)

    def _foreign(self) -> ObjectOutcome:
        self._tally.add("foreign")
        return MISSING

    def write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        deadline = self._deadline()
        outcomes = [KEPT] * len(items)
        fresh = [at for at, item in enumerate(items) if not self._keep(self._folder.path(item.name.key))]
        sizes = [memoryview(items[at].payload).nbytes + seal_bytes(items[at].name) for at in fresh]
        sound = True
        keys = [items[at].name.key for at in fresh]
        reserved = self._reserve(keys, sizes, deadline)
        unwritten = [(key, size) for key, size, refusal in zip(keys, sizes, reserved, strict=True) if refusal is None]
        try:
            for at, key, size, refusal in zip(fresh, keys, sizes, reserved, strict=True):
                if refusal is not None:
                    outcomes[at], sound = refusal, False
                    continue
                outcomes[at] = self._write_one(items[at], deadline) if sound else _cut_off()
                sound = outcomes[at].ok
                if sound:
                    unwritten.remove((key, size))
                    self._folder.coming.pop(key, None)
        finally:
            self._give_back(unwritten, deadline)
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _keep(self, path: str) -> bool:
        """Whether the file is there; if so, it counts as used now."""
        try:
            if not os.access(path, os.F_OK):
                return False
            self._use(path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _reserve(self, keys: Sequence[str], sizes: Sequence[int], deadline: float) -> list[ObjectOutcome | None]:
        """Reserve room in the counts for each object in turn, evicting if need be.

        Returns None for each object that got room, else its outcome.
        """
        if not sizes:
            return []
        answers: list[ObjectOutcome | None] = []
        try:
            with self._folder.locked(deadline):
                counted = self._folder.read_counts()
                if not counted.known:
                    self._wanted.set()
                    return [
                        ObjectOutcome(ObjectVerdict.FAILED, reason="what lies in the folder is still being counted")
                    ] * len(sizes)
                wanted = sum(size for size in sizes if size <= self._max_bytes)
                if counted.used + wanted > self._max_bytes:
                    self._make_room(counted, max(0, self._max_bytes - wanted), self._max_bytes // _SLACK)
                taken: dict[str, int] = {}
                for key, size in zip(keys, sizes, strict=True):
                    fits = counted.used + size <= self._max_bytes
                    answers.append(
                        None if fits else ObjectOutcome(ObjectVerdict.REFUSED, reason="the folder may not grow further")
                    )
                    if fits:
                        counted.add(shard_of(key), size, 1)
                        taken[key] = size
                self._folder.write_counts(counted)
                self._folder.coming.update(taken)
        except FolderBusy:
            return [_late()] * len(sizes)
        except OSError as error:
            return [_failed(error)] * len(sizes)
        return answers

    def _make_room(self, counted: ShardCounts, keep_bytes: int, slack: int) -> None:
        """Scan shards and delete their least recently used objects until at most `keep_bytes` stay; in a small folder,
        `slack` bytes fewer stay. The caller holds the lock and writes the counts."""
        if counted.objects <= _SMALL:
            found = {shard: self._folder.scan(shard, sweep=False) for shard in range(SHARDS)}
            for shard, one in found.items():
                counted.set(shard, one)
            if counted.used > keep_bytes - slack:
                self._evict(
                    counted, sorted(o for one in found.values() for o in one.objects), max(0, keep_bytes - slack)
                )
            return
        for _ in range(_MAX_SHARDS):
            if counted.used <= keep_bytes:
                return
            self._next_shard = (self._next_shard + 1) % SHARDS
            one = self._folder.scan(self._next_shard, sweep=False)
            counted.set(self._next_shard, one)
            oldest = sorted(one.objects)[: -(-len(one.objects) // _OLDEST)]
            self._evict(counted, oldest, 0 if counted.used > keep_bytes else counted.used)

    def _evict(self, counted: ShardCounts, objects: Sequence[tuple[int, int, str]], keep_bytes: int) -> None:
        """Delete these objects, in order, until at most `keep_bytes` stay in the whole folder.

        An object is (use time in ns, bytes, file name).
        """
        for _, size, file in objects:
            if counted.used <= keep_bytes:
                return
            key = file.removesuffix(".page")
            path = self._folder.path(key)
            if remove(path):
                self._tally.add("evicted")
            elif os.path.lexists(path):
                continue
            counted.add(shard_of(key), -size, -1)

    def _write_one(self, item: ObjectBuffer, deadline: float) -> ObjectOutcome:
        if self._clock.now() >= deadline:
            return _late()
        key = item.name.key
        temp = self._folder.temp_path(key)
        try:
            try:
                file = self._folder.open_new(temp, _WRITE)
            except FileNotFoundError:
                self._folder.make_shard(key)
                file = self._folder.open_new(temp, _WRITE)
            try:
                self._write_all(file, [item.payload, seal(item.name, item.digest, item.payload)])
                if self._wall_ns is not None:
                    self._use(file)
            finally:
                os.close(file)
            os.rename(temp, self._folder.path(key))
        except OSError as error:
            remove(temp)
            return _failed(error)
        return STORED

    def _write_all(self, file: int, parts: list[Payload]) -> None:
        left = [memoryview(part).cast("B") for part in parts]
        while left:
            wrote = self._writev(file, left)
            while left and wrote >= left[0].nbytes:
                wrote -= left.pop(0).nbytes
            if left:
                left[0] = left[0][wrote:]

    def delete(self, names: Sequence[ObjectName]) -> None:
        gone: list[tuple[str, int]] = []
        for name in names:
            path = self._folder.path(name.key)
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and remove(path):
                gone.append((name.key, status.st_size))
        self._give_back(gone, self._deadline())

    def _give_back(self, gone: Sequence[tuple[str, int]], deadline: float) -> None:
        """Give back, in the counts, the room of objects (key, bytes) that were deleted, or never written."""
        if not gone:
            return
        try:
            with self._folder.locked(deadline):
                counted = self._folder.read_counts()
                for key, size in gone:
                    counted.add(shard_of(key), -size, -1)
                    self._folder.coming.pop(key, None)
                self._folder.write_counts(counted)
        except (FolderBusy, OSError):  # The counts stay too high until the next scan.
            for key, _ in gone:
                self._folder.coming.pop(key, None)

    def capacity(self) -> BackendCapacity:
        counted = self._folder.read_counts()
        return BackendCapacity(self._max_bytes, counted.used, counted.objects)

    def counts(self) -> BackendCounts:
        return self._tally.snapshot()

    def close(self) -> None:
        self._closing.set()
        self._wanted.set()
        self._scanner.join(2 * self._timeout_s + 1)
        if not self._scanner.is_alive():  # Else it still uses the folder's files; it ends by itself.
            self._folder.close()


def _failed(error: OSError) -> ObjectOutcome:
    if error.errno in _FULL:
        return ObjectOutcome(ObjectVerdict.REFUSED, reason=f"the disk takes no more: {error.strerror}")
    return ObjectOutcome(ObjectVerdict.FAILED, reason=error.strerror or str(error))


def _cut_off() -> ObjectOutcome:
    return ObjectOutcome(ObjectVerdict.FAILED, reason=CUT_OFF)


def _late() -> ObjectOutcome:
    return ObjectOutcome(ObjectVerdict.FAILED, reason="the deadline has passed")
