"""The folder of files and batches: what clients upload, the batches made of it, and what was answered.

Each tenant has a folder of its own, named by a hash of its name, and ids are matched whole before they are a part of a
path: no text from outside leads anywhere else::

    tenants/HASH/files/file-ID            the bytes of a file, or of an output that grows
    tenants/HASH/files/file-ID.json       what it is (`StoredFile`); without it clients don't see the file
    tenants/HASH/files/file-ID.part       an upload under way, locked by its router
    tenants/HASH/batches/batch_ID.json    the batch (`StoredBatch`)
    tenants/HASH/batches/batch_ID.lock    there until the batch has ended; locked by the router that runs it
    tenants/HASH/batches/batch_ID.cancel  somebody wants it to end

A JSON file is written beside its place, synced and renamed into it. Locks are the kernel's (`flock`), which end with
the process that has them: a batch of a router that was killed is free at once, and two routers never run the same one.

**What was answered is the output itself** (`AnswerLog`): a line is appended for each request, and synced in bounded
intervals. After a crash what follows the last whole line is cut off, and requests without a line are asked again.

Everything here blocks, and is called in threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from twinpool.contracts.config.router_config import BatchConfig
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.json_logs import log
from twinpool.contracts.state_table import StateTable

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
USAGE_S, ORPHAN_S = 5.0, 3600.0
"""Seconds for which what the folder holds is taken as it was counted; and after which bytes that nothing names go."""
StoredT = TypeVar("StoredT", bound=msgspec.Struct)


class BatchState(StrEnum):
    VALIDATING = "validating"
    """Its input is to be read."""
    IN_PROGRESS = "in_progress"
    """Its requests are answered, as far as there is idle capacity."""
    FINALIZING = "finalizing"
    """All requests have a line; the files are made visible."""
    CANCELLING = "cancelling"
    """Somebody has cancelled it; the files of what was answered are made visible."""
    COMPLETED = "completed"
    FAILED = "failed"
    """Its input can't be run; `errors` says why."""
    EXPIRED = "expired"
    """Its time was over; requests without an answer have a line that says so."""
    CANCELLED = "cancelled"


class BatchEvent(StrEnum):
    CHECKED = "checked"
    """The input is fine."""
    REFUSED = "refused"
    """The input can't be run."""
    ANSWERED = "answered"
    """The last request has its line."""
    TIMED_OUT = "timed out"
    """The completion window is over, and the requests that are left have lines that say so."""
    CANCEL = "cancel"
    """A client wants it to end."""
    PUBLISHED = "published"
    """The files are visible."""


BATCH = StateTable[BatchState, BatchEvent](
    "batch",
    {
        BatchState.VALIDATING: {
            BatchEvent.CHECKED: BatchState.IN_PROGRESS,
            BatchEvent.REFUSED: BatchState.FAILED,
            BatchEvent.CANCEL: BatchState.CANCELLING,
        },
        BatchState.IN_PROGRESS: {
            BatchEvent.ANSWERED: BatchState.FINALIZING,
            BatchEvent.TIMED_OUT: BatchState.EXPIRED,
            BatchEvent.REFUSED: BatchState.FAILED,
            BatchEvent.CANCEL: BatchState.CANCELLING,
        },
        BatchState.FINALIZING: {BatchEvent.PUBLISHED: BatchState.COMPLETED},
        BatchState.CANCELLING: {BatchEvent.PUBLISHED: BatchState.CANCELLED},
    },
)


class StorageFull(TwinpoolError):
    """Raised where the disk, or the share of it that files may take, has no room."""


class TooMany(TwinpoolError):
    """Raised where a tenant has as many files or batches as it may have."""


class FileInUse(TwinpoolError):
    """Raised where the input of a batch that has not ended is to be deleted, or a batch that has ended cancelled."""


class StoredFile(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None


class BatchProblem(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch. `stamps`: when it came to each state, in seconds since 1970, by the state's name."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_file_id: str
    error_file_id: str
    status: BatchState = BatchState.VALIDATING
    metadata: dict[str, str] | None = None
    errors: list[BatchProblem] = []
    stamps: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    published: list[str] = []
    """The files of it that clients see."""

    @property
    def ended(self) -> bool:
        return BATCH.terminal(self.status)

    def after(self, event: BatchEvent, now: float, **changes: Any) -> StoredBatch:
        """Return the batch as it is after `event`. Raises `IllegalTransition`."""
        status = BATCH.next(self.status, event)
        stamps = {**self.stamps, str(status): int(now)}
        return msgspec.structs.replace(self, status=status, stamps=stamps, **changes)


class BatchPlace(NamedTuple):
    """Where a batch is: the folder of its tenant, and its id."""

    folder: Path
    id: str

    @property
    def state(self) -> Path:
        return self.folder / "batches" / f"{self.id}.json"

    @property
    def lock(self) -> Path:
        return self.state.with_suffix(".lock")

    @property
    def cancel(self) -> Path:
        return self.state.with_suffix(".cancel")

    def file(self, file_id: str) -> Path:
        return self.folder / "files" / file_id


class BatchStore:
    """All files and batches below one folder, which several routers may share. Raises `ConfigError` where it can't be
    used. Callers hold no lock: every method can be called by several threads."""

    def __init__(self, config: BatchConfig, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since 1970."""
        self.config, self._now = config, now
        self._root = Path(config.folder) / "tenants"
        self._counted: tuple[float, dict[str, int]] = (-USAGE_S, {})
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = Path(config.folder) / _new_id("probe-")
            with locked_new(probe):
                excludes = Locked.of(probe) is None
                probe.unlink()
            if not excludes:
                raise ConfigError(f"config key batch.folder={config.folder}: locks (flock) exclude nobody there")
        except OSError as error:
            raise ConfigError(f"config key batch.folder={config.folder} can't be used: {error}") from None

    def _of(self, tenant: str) -> Path:
        folder = self._root / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        for part in ("files", "batches"):
            (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    # ------------------------------------------------------------ files

    def place_of_upload(self, tenant: str) -> Path:
        """Return where a new file is to be. Raises `TooMany`, `StorageFull`."""
        files = self._of(tenant) / "files"
        if len(list(files.glob("*.json"))) >= self.config.max_files:
            raise TooMany(f"you have {self.config.max_files} files, which is the most: delete some first")
        self.check_room(files.parent, 0)
        return files / _new_id("file-")

    def show(self, path: Path, stored: StoredFile) -> None:
        """Make the bytes at `path` a file that clients see. Raises `OSError`."""
        _write(_json(path), stored)

    def check_room(self, folder: Path, more: int) -> None:
        """Raise `StorageFull` where a tenant's folder, all of them, or the disk can't take `more` bytes."""
        at, held = self._counted
        if not 0 <= (now := time.monotonic()) - at < USAGE_S:
            held = {one.name: _size_of(one) for one in self._root.iterdir()}
            self._counted = now, held
        limits = self.config
        if held.get(folder.name, 0) + more > limits.tenant_bytes:
            raise StorageFull(f"your files take {limits.tenant_bytes} bytes, which is the most: delete some first")
        if sum(held.values()) + more > limits.disk_bytes:
            raise StorageFull(f"all files together take {limits.disk_bytes} bytes, which is the most; try again later")
        if shutil.disk_usage(self._root).free - more < limits.free_bytes:
            raise StorageFull("the server's disk is full; try again later")
        held[folder.name] = held.get(folder.name, 0) + more

    def files(self, tenant: str) -> list[StoredFile]:
        """Return a tenant's files, the latest first."""
        found = [_read(path, StoredFile) for path in (self._of(tenant) / "files").glob("*.json")]
        return sorted([one for one in found if one], key=lambda one: (one.created_at, one.id), reverse=True)

    def file(self, tenant: str, file_id: str) -> tuple[StoredFile, Path] | None:
        """Return a file of a tenant and where its bytes are; None where it has no such file."""
        if not FILE_ID.fullmatch(file_id):
            return None
        path = self._of(tenant) / "files" / file_id
        stored = _read(_json(path), StoredFile)
        return (stored, path) if stored is not None else None

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; False where there is none. Raises `FileInUse`."""
        found = self.file(tenant, file_id)
        if found is None:
            return False
        if any(not one.ended and one.input_file_id == file_id for one in self.batches(tenant)):
            raise FileInUse(f"{file_id} is the input of a batch that has not ended: cancel that first")
        for path in (_json(found[1]), found[1]):
            path.unlink(missing_ok=True)
        self._counted = (-USAGE_S, {})
        return True

    # ------------------------------------------------------------ batches

    def create(
        self, tenant: str, input_id: str, endpoint: str, window: str, seconds: int, metadata: Any
    ) -> StoredBatch:
        """Keep a new batch, which some router claims. Raises `TooMany`."""
        folder, now = self._of(tenant), int(self._now())
        if len(list((folder / "batches").glob("*.lock"))) >= self.config.max_batches:
            raise TooMany(
                f"{self.config.max_batches} of your batches have not ended, which is the most; try again later"
            )
        batch = StoredBatch(
            _new_id("batch_"), tenant, endpoint, input_id, window, now, now + seconds,
            _new_id("file-"), _new_id("file-"), metadata=metadata,
        )  # fmt: skip
        place = BatchPlace(folder, batch.id)
        self._forget(folder)
        with locked_new(place.lock):
            self.keep(place, batch)
        return batch

    def _forget(self, folder: Path) -> None:
        """Delete the batches that ended first, beyond as many as a tenant may have files."""
        with suppress(FileNotFoundError):  # Another router does so, too.
            ended = [one for one in (folder / "batches").glob("*.json") if not one.with_suffix(".lock").exists()]
            ended.sort(key=lambda one: one.stat().st_mtime, reverse=True)
            for path in ended[self.config.max_files :]:
                path.unlink()

    def keep(self, place: BatchPlace, batch: StoredBatch) -> None:
        """Write a batch; one that has ended is nobody's any more."""
        _write(place.state, batch)
        if batch.ended:
            place.cancel.unlink(missing_ok=True)
            place.lock.unlink(missing_ok=True)

    def batches(self, tenant: str) -> list[StoredBatch]:
        """Return a tenant's batches, the latest first."""
        folder = self._of(tenant)
        found = [self._shown(BatchPlace(folder, path.stem)) for path in (folder / "batches").glob("*.json")]
        return sorted([one for one in found if one], key=lambda one: (one.created_at, one.id), reverse=True)

    def batch(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Return a batch of a tenant; None where it has no such batch."""
        return self._shown(BatchPlace(self._of(tenant), batch_id)) if BATCH_ID.fullmatch(batch_id) else None

    def _shown(self, place: BatchPlace) -> StoredBatch | None:
        """A batch as clients see it: who has cancelled it need not wait until its router has noticed."""
        batch = _read(place.state, StoredBatch)
        if batch is not None and BatchEvent.CANCEL in BATCH.rows.get(batch.status, {}):
            with suppress(OSError):
                return batch.after(BatchEvent.CANCEL, place.cancel.stat().st_mtime)
        return batch

    def cancel(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Have a batch end; None where there is none. Raises `FileInUse` where it has ended."""
        batch = self.batch(tenant, batch_id)
        if batch is None:
            return None
        if batch.status is not BatchState.CANCELLING:
            if BatchEvent.CANCEL not in BATCH.rows.get(batch.status, {}):
                raise FileInUse(f"a batch that is {batch.status} can't be cancelled")
            BatchPlace(self._of(tenant), batch_id).cancel.touch(mode=0o600)
        return self.batch(tenant, batch_id)

    def waiting(self) -> Iterator[BatchPlace]:
        """Yield where batches are that have not ended, those of other routers included."""
        for lock in sorted(self._root.glob("*/batches/*.lock")):
            yield BatchPlace(lock.parents[1], lock.stem)

    def claim(self, place: BatchPlace) -> tuple[Locked, StoredBatch] | None:
        """Take a batch for this router, until the lock is released; None where another has it, it has ended, or it
        can't be read now."""
        lock = Locked.of(place.lock)
        if lock is None:
            return None
        batch = _read(place.state, StoredBatch)
        if batch is not None and not batch.ended:
            return lock, batch
        if batch is not None or not place.state.exists():
            place.lock.unlink(missing_ok=True)  # Its router ended before it could, or its client's before it was there.
        lock.release()
        return None

    def publish(self, place: BatchPlace, batch: StoredBatch) -> list[str]:
        """Make the outputs of a batch visible, those that have a line; returns their ids. Idempotent."""
        shown = []
        for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            path, now = place.file(file_id), int(self._now())
            with suppress(FileNotFoundError):
                if size := path.stat().st_size:
                    name = f"{batch.id}_{kind}.jsonl"
                    _write(_json(path), StoredFile(file_id, size, now, name, "batch_output", now + self.config.keep_s))
                    shown.append(file_id)
                else:
                    path.unlink()
        return shown

    def sweep(self) -> None:
        """Delete what has expired, uploads whose router has gone, and bytes that nothing names."""
        now = self._now()
        for folder in self._root.iterdir():
            batches = [one for path in (folder / "batches").glob("*.json") if (one := _read(path, StoredBatch))]
            used = {
                name for b in batches if not b.ended for name in (b.input_file_id, b.output_file_id, b.error_file_id)
            }
            for batch in batches:
                if batch.ended and now > batch.created_at + self.config.keep_s:
                    BatchPlace(folder, batch.id).state.unlink(missing_ok=True)
            for path in [*(folder / "batches").glob("*.new"), *(folder / "batches").glob("*.cancel")]:
                with suppress(OSError):
                    if not path.with_suffix(".lock").exists() and now > path.stat().st_mtime + ORPHAN_S:
                        path.unlink()
            for path in (folder / "files").iterdir():
                with suppress(OSError):
                    if path.suffix == ".json":
                        stored = _read(path, StoredFile)
                        if (
                            stored
                            and stored.expires_at is not None
                            and now > stored.expires_at
                            and stored.id not in used
                        ):
                            path.unlink()
                            path.with_suffix("").unlink()
                    elif path.suffix == ".part":
                        if (lock := Locked.of(path)) is not None:
                            path.unlink()
                            lock.release()
                    elif not _json(path).exists() and path.name not in used and now > path.stat().st_mtime + ORPHAN_S:
                        path.unlink()


class Locked:
    """A file that this process has to itself. Released once; also by the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def of(cls, path: Path) -> Locked | None:
        """Lock a file; None where another has it, or it is gone."""
        try:
            found = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(found).st_ino == os.stat(path).st_ino:
                return cls(found)
        except OSError:
            pass
        os.close(found)
        return None

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def __enter__(self) -> Locked:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def locked_new(path: Path) -> Locked:
    """Make a file that nobody else has, locked. Made again where somebody took it for left behind before it was locked.
    Raises `OSError`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return Locked(descriptor)
        os.close(descriptor)


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def _json(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.glob("*/*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _read(path: Path, kind: type[StoredT]) -> StoredT | None:
    """Read what is kept at `path`; None where nothing is, or nothing that can be read, which is logged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log("stored file can't be read", path=str(path), reason=str(error))
        return None


def _write(path: Path, content: msgspec.Struct) -> None:
    """Keep `content` at `path` as a whole or not at all. Raises `OSError`."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with beside.open("xb") as out:
            out.write(msgspec.json.encode(content))
            out.flush()
            os.fsync(out.fileno())
        beside.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        beside.unlink(missing_ok=True)
