"""The folder of the `file` backend: where things lie, who is at work in it, and how much it holds.

    ROOT/ledger                     bytes and objects in use (two little-endian int64); its flock is the folder's lock
    ROOT/owners/ID                  one for each open backend, held locked (flock) as long as its process lives
    ROOT/ab/ab12...ef.page          an object, under the first two digits of its key
    ROOT/ab/.ab12...ef.ID.N.tmp     an object that the backend ID is writing

Any number of processes of one host work in a folder, and each may be killed at any moment. Three rules carry that:

* An object appears by rename, complete or not at all. A temp file whose owner's lock is free is nobody's: it is swept
  when a folder is opened. Locks are asked and not process numbers, so containers may share a folder.
* The files are the truth, the ledger is an estimate that errs upward: room is taken from it *before* a file is
  written and given back *after* one is gone, so a killed process leaves it too high. Every scan (on opening, and when
  the ledger says that the folder is full) sets it right. What another process has taken from the ledger and not yet
  begun to write is unknown to a scan, so the cap can be passed by one batch a process, until the next scan.
* Use times are the files' modification times, so they outlive a restart and are common to all processes.

Nothing is ever synced to the disk: a power cut may lose or tear what was written shortly before, which a seal shows
when it is read, and what is lost is computed again. A scan trusts names and sizes; files that are not called as above
are foreign, left alone and not counted.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contracts.clock import Clock
from contracts.errors import ConfigError

_PAGE = re.compile(r"([0-9a-f]{2})[0-9a-f]{30}\.page")
_TEMP = re.compile(r"\.[0-9a-f]{32}\.([0-9a-f]{32})\.[0-9]+\.tmp")
_OWNER = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_LEDGER = struct.Struct("<qq")
_POLL_S = 0.0002


class Busy(Exception):
    """Raised when the folder's lock was not free by the deadline."""


@dataclass(slots=True)
class Scan:
    """What lies in the folder: the objects with their use times, and what else was met."""

    objects: list[tuple[int, int, str]] = field(default_factory=list)
    """(use time in ns, bytes, file name), in no order."""
    temp_bytes: int = 0
    """Being written by others."""
    foreign: int = 0


class Folder:
    """An open folder: this process's place in it, the lock and the ledger.

    Raises `ConfigError` when the folder can't be made or written to.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = str(root)
        self._clock = clock
        self._thread_lock = threading.Lock()
        self._next_temp = 0
        self._closed = False
        try:
            os.makedirs(os.path.join(self.root, "owners"), exist_ok=True)
            self._ledger = os.open(os.path.join(self.root, "ledger"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot use {root} for storage: {error.strerror}; set cache.storage.path to a folder you may write to"
            ) from None
        try:
            self._owner, self._owner_fd = self._enter()
        except OSError as error:
            os.close(self._ledger)
            raise ConfigError(f"cannot use {root} for storage: {error.strerror}") from None

    def _enter(self) -> tuple[str, int]:
        while True:
            owner = uuid.uuid4().hex
            path = self._owner_path(owner)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.exists(path):
                return owner, fd
            os.close(fd)  # A sweeper came between the two calls and took it for a dead one's.

    def _owner_path(self, owner: str) -> str:
        return os.path.join(self.root, "owners", owner)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            remove(self._owner_path(self._owner))
            os.close(self._owner_fd)
            os.close(self._ledger)

    def path(self, key: str) -> str:
        return f"{self.root}/{key[:2]}/{key}.page"

    def temp_path(self, key: str) -> str:
        with self._thread_lock:
            self._next_temp += 1
            return f"{self.root}/{key[:2]}/.{key}.{self._owner}.{self._next_temp}.tmp"

    def make_shard(self, key: str) -> None:
        os.makedirs(f"{self.root}/{key[:2]}", exist_ok=True)

    @contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the folder's lock against threads and processes; raises `Busy` when it isn't had by `deadline`."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - self._clock.now())):
            raise Busy
        try:
            while True:
                try:
                    fcntl.flock(self._ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock.now() >= deadline:
                        raise Busy from None
                    time.sleep(_POLL_S)
            try:
                yield
            finally:
                fcntl.flock(self._ledger, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def read_ledger(self) -> tuple[int, int]:
        """Bytes and objects in use."""
        raw = os.pread(self._ledger, _LEDGER.size, 0)
        used, objects = _LEDGER.unpack(raw) if len(raw) == _LEDGER.size else (0, 0)
        return max(0, used), max(0, objects)

    def write_ledger(self, used: int, objects: int) -> None:
        """The caller holds the lock."""
        os.pwrite(self._ledger, _LEDGER.pack(max(0, used), max(0, objects)), 0)

    def scan(self, *, sweep: bool) -> Scan:
        """Look at every file by name and size; with `sweep`, delete what dead writers left behind."""
        found = Scan()
        for shard in self._entries(self.root):
            if not _SHARD.fullmatch(shard.name) or not shard.is_dir(follow_symlinks=False):
                found.foreign += shard.name not in ("ledger", "owners")
                continue
            for entry in self._entries(shard.path):
                self._look(shard.name, entry, found, sweep)
        if sweep:
            for entry in self._entries(os.path.join(self.root, "owners")):
                if _OWNER.fullmatch(entry.name):
                    self._alive(entry.name)
        return found

    def _look(self, shard: str, entry: os.DirEntry[str], found: Scan, sweep: bool) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        page, temp = _PAGE.fullmatch(entry.name), _TEMP.fullmatch(entry.name)
        if page and page[1] == shard and stat.S_ISREG(status.st_mode):
            found.objects.append((status.st_mtime_ns, status.st_size, entry.name))
        elif not temp:
            found.foreign += 1
        elif sweep and not self._alive(temp[1]):
            remove(entry.path)
        else:
            found.temp_bytes += status.st_size

    def _alive(self, owner: str) -> bool:
        """Whether the process of `owner` lives; the mark of a dead one is removed."""
        if owner == self._owner:
            return True
        path = self._owner_path(owner)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    @staticmethod
    def _entries(path: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(path) as entries:
                yield from entries
        except OSError:
            return


def remove(path: str) -> bool:
    """Whether this call is the one that removed the file."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
