"""The folder of the `file` backend: the files in it, the processes that work in it, and its counts.

    ROOT/ledger                     its flock is the folder's lock
    ROOT/counts                     bytes and objects under each two digits (`ShardCounts`)
    ROOT/owners/ID                  one for each open backend, held locked (flock) as long as its process lives
    ROOT/ab/ab12...ef.page          an object, under the first two digits of its key
    ROOT/ab/.ab12...ef.ID.N.tmp     an object that the backend ID is writing

Any number of processes of one host work in a folder, and each may be killed at any moment. Three rules make that safe:

* An object appears by rename, complete or not at all. A temp file whose owner's lock is free was left by a dead
  process; the next backend that opens the folder sweeps it. The test is a lock and not a process number, so containers
  may share a folder.
* The files are the truth, the counts are an estimate that errs upward: room is taken from them *before* a file is
  written and given back *after* one is deleted, so a killed process leaves them too high. Each scan of a shard sets its
  counts right. A scan doesn't know the room that another process has taken for files it hasn't begun to write, so the
  cap can be passed by one batch a process, until the next scan. Where there are no counts, or none that can be read,
  nothing is written until all shards have been scanned.
* Use times are the files' modification times, so they outlive a restart and are common to all processes.

A folder may hold millions of files, so nothing is done to all of them at once: the lock is held for one shard of 256.

Objects are made of prompts. So files and folders are open to their owner alone, or to the group too where the operator
says so (`cache.storage.group_access`); shards that an earlier version left open to others are closed. A `ROOT` that was
there before keeps its mode.

Nothing is ever synced to the disk: a power cut may lose or tear objects that were written shortly before. The seal
shows that when one is read, and lost pages are computed again. A scan trusts names and sizes; files whose names aren't
of the forms above are foreign: left alone and not counted.
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

from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import ConfigError

_PAGE = re.compile(r"([0-9a-f]{2})[0-9a-f]{30}\.page")
_TEMP = re.compile(r"\.[0-9a-f]{32}\.([0-9a-f]{32})\.[0-9]+\.tmp")
_OWNER = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_POLL_S = 0.0002
SHARDS = 256


class FolderBusy(Exception):
    """Raised when the folder's lock was not free by the deadline."""


@dataclass(slots=True)
class FolderScan:
    """The content of a shard: the objects with their use times, files being written, and foreign files."""

    objects: list[tuple[int, int, str]] = field(default_factory=list)
    """(use time in ns, bytes, file name), in no order."""
    temps: int = 0
    temp_bytes: int = 0
    """`temps` and `temp_bytes`: files that other backends are writing, and their bytes so far."""
    coming: list[int] = field(default_factory=list)
    """Bytes of each object that this backend has reserved room for and that isn't there yet."""
    foreign: int = 0
    """The number of foreign files."""


class ShardCounts:
    """Bytes and objects in use, by shard. `known`: whether all shards have been counted once.

    `raw` that can't be read gives zeros that aren't known.
    """

    FORMAT = struct.Struct(f"<8s{2 * SHARDS}q")
    KNOWN, UNKNOWN = b"tpcount1", b"tpcount?"

    def __init__(self, raw: bytes) -> None:
        mark, *figures = self.FORMAT.unpack(raw) if len(raw) == self.FORMAT.size else (b"",)
        self.known = mark == self.KNOWN
        self._figures: list[int] = figures if mark in (self.KNOWN, self.UNKNOWN) else [0] * (2 * SHARDS)

    @property
    def used(self) -> int:
        return sum(self._figures[0::2])

    @property
    def objects(self) -> int:
        return sum(self._figures[1::2])

    def add(self, shard: int, size: int, objects: int) -> None:
        """Add `size` bytes and `objects` objects to a shard's counts; negative numbers take them away."""
        self._figures[2 * shard] = max(0, self._figures[2 * shard] + size)
        self._figures[2 * shard + 1] = max(0, self._figures[2 * shard + 1] + objects)

    def set(self, shard: int, found: FolderScan) -> None:
        """Set a shard's counts to the result of a scan."""
        size = sum(size for _, size, _ in found.objects) + found.temp_bytes + sum(found.coming)
        self._figures[2 * shard : 2 * shard + 2] = [size, len(found.objects) + found.temps + len(found.coming)]

    def packed(self) -> bytes:
        return self.FORMAT.pack(self.KNOWN if self.known else self.UNKNOWN, *self._figures)


def shard_of(key: str) -> int:
    """Returns the number of the shard that an object with this key lies in."""
    return int(key[:2], 16)


class ObjectFolder:
    """An open folder: the backend's owner file in it, the lock and the counts.

    With `group`, the folder's group has access. Raises `ConfigError` when the folder can't be made or written to.
    """

    def __init__(self, root: Path, clock: Clock, group: bool = False) -> None:
        self.root = str(root)
        self._clock = clock
        self._group = group
        self._file_mode, self._folder_mode = (0o660, 0o2770) if group else (0o600, 0o700)
        self._thread_lock = threading.Lock()
        self._next_temp = 0
        self.coming: dict[str, int] = {}
        """Bytes, by key, of objects that this backend has reserved room for, until they are there. A caller that gives
        room back holds the lock."""
        self._closed = False
        opened: list[int] = []
        try:
            self._make_folder(self.root)
            self._make_folder(os.path.join(self.root, "owners"))
            for name in ("ledger", "counts"):
                opened.append(self.open_new(os.path.join(self.root, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
            self._ledger, self._counts = opened
            self._owner, self._owner_fd = self._enter()
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise ConfigError(
                f"cannot use {root} for storage: {error.strerror}; set cache.storage.path to a folder you may write to"
            ) from None

    def _make_folder(self, path: str) -> None:
        """Make a folder with its parents, if it isn't there."""
        parent = os.path.dirname(path)
        if parent and not os.path.isdir(parent):
            os.makedirs(parent, exist_ok=True)
        try:
            os.mkdir(path, self._folder_mode)
        except FileExistsError:
            return
        if self._group:
            os.chmod(path, self._folder_mode)  # Whatever the umask says.

    def open_new(self, path: str, flags: int) -> int:
        """Open a file with `flags`, and give it the folder's file mode if it is this user's; returns the
        descriptor."""
        fd = os.open(path, flags, self._file_mode)
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != self._file_mode:
            os.fchmod(fd, self._file_mode)
        return fd

    def _enter(self) -> tuple[str, int]:
        """Make and lock an owner file; returns the backend's id and the descriptor that holds the lock."""
        while True:
            owner = uuid.uuid4().hex
            path = self._owner_path(owner)
            fd = self.open_new(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.exists(path):
                return owner, fd
            os.close(fd)  # A sweep came between the two calls and took the file for that of a dead process.

    def _owner_path(self, owner: str) -> str:
        return os.path.join(self.root, "owners", owner)

    def close(self) -> None:
        """Remove the owner file and close all descriptors. Idempotent."""
        if not self._closed:
            self._closed = True
            remove(self._owner_path(self._owner))
            for fd in (self._owner_fd, self._ledger, self._counts):
                os.close(fd)

    def path(self, key: str) -> str:
        """Returns the path of the object with this key."""
        return f"{self.root}/{key[:2]}/{key}.page"

    def temp_path(self, key: str) -> str:
        """Returns a new path at which to write the object with this key, before it is renamed to `path`."""
        with self._thread_lock:
            self._next_temp += 1
            return f"{self.root}/{key[:2]}/.{key}.{self._owner}.{self._next_temp}.tmp"

    def make_shard(self, key: str) -> None:
        """Make the folder of the shard that `key` lies in, if it isn't there."""
        self._make_folder(self.root)
        self._make_folder(f"{self.root}/{key[:2]}")

    @contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the folder's lock against other threads and processes; not reentrant.

        Raises `FolderBusy` when the lock isn't free by `deadline` (seconds by the folder's clock).
        """
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - self._clock.now())):
            raise FolderBusy
        try:
            while True:
                try:
                    fcntl.flock(self._ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock.now() >= deadline:
                        raise FolderBusy from None
                    time.sleep(_POLL_S)
            try:
                yield
            finally:
                fcntl.flock(self._ledger, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def read_counts(self) -> ShardCounts:
        """Returns the counts. A caller that goes on to write them holds the lock."""
        return ShardCounts(os.pread(self._counts, ShardCounts.FORMAT.size, 0))

    def write_counts(self, counted: ShardCounts) -> None:
        """Write the counts. The caller holds the lock."""
        os.pwrite(self._counts, counted.packed(), 0)

    @property
    def empty(self) -> bool:
        """Whether the folder has no shards."""
        return not any(_SHARD.fullmatch(entry.name) for entry in self._entries(self.root))

    def scan(self, shard: int, *, sweep: bool) -> FolderScan:
        """Look at every file of a shard by name and size.

        With `sweep`, delete temp files of dead writers, and close the shard to users who may not read it.
        """
        name = f"{shard:02x}"
        # Taken before the files are listed: an object that is written by then is found among them.
        coming = {f"{key}.page": size for key, size in self.coming.copy().items() if key[:2] == name}
        found = self._files(name, sweep)
        there = {file for _, _, file in found.objects} if coming else ()
        found.coming = [size for file, size in coming.items() if file not in there]
        return found

    def _files(self, name: str, sweep: bool) -> FolderScan:
        found = FolderScan()
        path = f"{self.root}/{name}"
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError:
            return found
        if not stat.S_ISDIR(status.st_mode):
            return found
        if sweep and not self._group and status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.chmod(path, self._folder_mode)
        for entry in self._entries(path):
            self._look(name, entry, found, sweep)
        return found

    def tidy(self) -> int:
        """Remove the owner files of dead processes; returns how many foreign files lie beside the shards."""
        for entry in self._entries(os.path.join(self.root, "owners")):
            if _OWNER.fullmatch(entry.name):
                self._alive(entry.name)
        foreign = 0
        for entry in self._entries(self.root):
            shard = _SHARD.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            foreign += not shard and entry.name not in ("ledger", "counts", "owners")
        return foreign

    def _look(self, shard: str, entry: os.DirEntry[str], found: FolderScan, sweep: bool) -> None:
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
        elif temp[1] != self._owner:
            found.temps += 1
            found.temp_bytes += status.st_size

    def _alive(self, owner: str) -> bool:
        """Whether the process of the backend `owner` lives; the owner file of a dead one is removed."""
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
    """Remove a file; returns whether this call removed it (False after any `OSError`)."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
