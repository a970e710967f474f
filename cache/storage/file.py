"""Objects as files in a folder of this host, shared by any number of processes; `folder.py` says how it is kept whole.

A read is open, one `preadv` of payload and seal straight into the caller's page, and a check. Nothing about single
objects is kept in memory: a name is looked up in the file system each time, as another process may have written or
deleted it in the meantime.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from cache.storage.backend import (
    KEPT,
    MISSING,
    STORED,
    Capacity,
    Counts,
    Item,
    ObjectName,
    Outcome,
    Payload,
    Tally,
    Verdict,
)
from cache.storage.folder import Busy, Folder, Scan, remove
from cache.storage.seal import check_seal, seal, seal_bytes, wrong_size
from contracts.clock import Clock, SystemClock

Writer = Callable[[int, Sequence[Payload]], int]
"""`os.writev`, or what a test puts in its place."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link or a pipe under an object's name must not be followed or waited for."""
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SLACK = 16
"""Evicting frees this part of the cap (1/16) beyond what is needed, as each time costs a scan of the folder."""


class FileBackend:
    """Objects under `root`, at most `max_bytes` of them with their seals.

    A call waits `timeout_s` at most for other processes and starts no file after it. `wall_ns` gives the use times
    (None: the file system's own clock), `writev` writes. Raises `ConfigError` when the folder can't be used.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        timeout_s: float = 5.0,
        *,
        clock: Clock | None = None,
        wall_ns: Callable[[], int] | None = None,
        writev: Writer = os.writev,
    ) -> None:
        self._clock = clock or SystemClock()
        self._folder = Folder(root, self._clock)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._wall_ns, self._writev = wall_ns, writev
        self._tally = Tally()
        try:
            with self._folder.locked(self._deadline()):
                found = self._folder.scan(sweep=True)
                self._tally.add("foreign", found.foreign)
                self._folder.write_ledger(*self._evict(found, max_bytes))
        except Busy:
            pass  # Another process is scanning or evicting right now, and its ledger is as good.
        except OSError:
            pass  # The ledger could not be written: the disk is full, and refuses pages by itself.

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

    def read(self, names: Sequence[ObjectName], into: Sequence[memoryview]) -> list[Outcome]:
        deadline = self._deadline()
        outcomes = [self._read_one(name, buffer, deadline) for name, buffer in zip(names, into, strict=True)]
        bad = [name for name, outcome in zip(names, outcomes, strict=True) if outcome.verdict is Verdict.DAMAGED]
        if bad:
            self.delete(bad)
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _read_one(self, name: ObjectName, into: memoryview, deadline: float) -> Outcome:
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

    def _read_open(self, file: int, name: ObjectName, into: memoryview) -> Outcome:
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
        if outcome.verdict is Verdict.FOUND:
            self._use(file)
        return outcome

    def _use(self, file: int | str, *, follow_symlinks: bool = True) -> None:
        if self._wall_ns is None:
            os.utime(file, follow_symlinks=follow_symlinks)
        else:
            now = self._wall_ns()
            os.utime(file, ns=(now, now), follow_symlinks=follow_symlinks)

    def _foreign(self) -> Outcome:
        self._tally.add("foreign")
        return MISSING

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        deadline = self._deadline()
        outcomes = [KEPT] * len(items)
        fresh = [at for at, item in enumerate(items) if not self._keep(self._folder.path(item.name.key))]
        sizes = [memoryview(items[at].payload).nbytes + seal_bytes(items[at].name) for at in fresh]
        unused, stored = 0, 0
        for at, size, granted in zip(fresh, sizes, self._reserve(sizes, deadline), strict=True):
            if granted is not None:
                outcomes[at] = granted
                continue
            outcomes[at] = self._write_one(items[at], deadline)
            if not outcomes[at].ok:
                unused, stored = unused + size, stored + 1
        self._give_back(unused, stored, deadline)
        self._tally.add_outcomes(outcomes)
        return outcomes

    def _keep(self, path: str) -> bool:
        """Whether the file is there; it counts as used now."""
        try:
            if not os.access(path, os.F_OK):
                return False
            self._use(path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _reserve(self, sizes: Sequence[int], deadline: float) -> list[Outcome | None]:
        """Take room in the ledger for each size in turn, evicting if need be; an outcome for those that get none."""
        if not sizes:
            return []
        answers: list[Outcome | None] = []
        try:
            with self._folder.locked(deadline):
                used, objects = self._folder.read_ledger()
                wanted = sum(size for size in sizes if size <= self._max_bytes)
                if used + wanted > self._max_bytes:
                    keep = self._max_bytes - wanted - self._max_bytes // _SLACK
                    used, objects = self._evict(self._folder.scan(sweep=False), max(0, keep))
                for size in sizes:
                    fits = used + size <= self._max_bytes
                    answers.append(None if fits else Outcome(Verdict.REFUSED, reason="the folder may not grow further"))
                    used, objects = (used + size, objects + 1) if fits else (used, objects)
                self._folder.write_ledger(used, objects)
        except Busy:
            return [_late()] * len(sizes)
        except OSError as error:
            return [_failed(error)] * len(sizes)
        return answers

    def _evict(self, found: Scan, keep_bytes: int) -> tuple[int, int]:
        """Delete what was used longest ago until `keep_bytes` stay; bytes and objects then. The lock is held."""
        used, objects = sum(size for _, size, _ in found.objects) + found.temp_bytes, len(found.objects)
        if used > keep_bytes:
            for _, size, file in sorted(found.objects):
                if used <= keep_bytes:
                    break
                path = self._folder.path(file.removesuffix(".page"))
                if remove(path):
                    self._tally.add("evicted")
                elif os.path.lexists(path):
                    continue
                used, objects = used - size, objects - 1
        return used, objects

    def _write_one(self, item: Item, deadline: float) -> Outcome:
        if self._clock.now() >= deadline:
            return _late()
        key = item.name.key
        temp = self._folder.temp_path(key)
        try:
            try:
                file = os.open(temp, _WRITE, 0o644)
            except FileNotFoundError:
                self._folder.make_shard(key)
                file = os.open(temp, _WRITE, 0o644)
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
        freed, gone = 0, 0
        for name in names:
            path = self._folder.path(name.key)
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and remove(path):
                freed, gone = freed + status.st_size, gone + 1
        self._give_back(freed, gone, self._deadline())

    def _give_back(self, size: int, objects: int, deadline: float) -> None:
        if objects == 0:
            return
        try:
            with self._folder.locked(deadline):
                used, count = self._folder.read_ledger()
                self._folder.write_ledger(used - size, count - objects)
        except (Busy, OSError):
            pass  # The ledger stays too high until the next scan.

    def capacity(self) -> Capacity:
        used, objects = self._folder.read_ledger()
        return Capacity(self._max_bytes, used, objects)

    def counts(self) -> Counts:
        return self._tally.snapshot()

    def close(self) -> None:
        self._folder.close()


def _failed(error: OSError) -> Outcome:
    if error.errno in _FULL:
        return Outcome(Verdict.REFUSED, reason=f"the disk takes no more: {error.strerror}")
    return Outcome(Verdict.FAILED, reason=error.strerror or str(error))


def _late() -> Outcome:
    return Outcome(Verdict.FAILED, reason="the deadline has passed")
