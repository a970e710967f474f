"""The bytes of files: of an upload, of the lines of a batch's input, and of those that were answered.

An input isn't read whole: it is looked through once, of each request it is remembered where it begins, and its body is
left as it is for whoever reads requests. An output is its own journal: lines are only appended, each with the number of
its request in its id, so what a crash leaves says by itself which requests have an answer.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from twinpool.router.batch.batch_store import (
    BatchProblem,
    BatchStore,
    StorageFull,
    StoredFile,
    TooMany,
    locked_new,
)

MAX_CUSTOM_ID = 512
MAX_PROBLEMS = 50
"""Problems of an input that are told; further ones aren't looked for."""
REST_BYTES, REST_S = 1 << 20, 0.005
"""After so many bytes of an input or an output that are read, other threads get so many seconds."""


class Upload:
    """A file that is being received. Ended by `finish` or `abandon`, which leaves nothing of it behind."""

    def __init__(self, store: BatchStore, tenant: str) -> None:
        """Raises `TooMany`, `StorageFull`."""
        self._store, self._path = store, store.place_of_upload(tenant)
        self._part = self._path.with_suffix(".part")
        self._lock = locked_new(self._part)
        self.size = 0

    def write(self, piece: bytes) -> None:
        """Append bytes. Raises `StorageFull`; and `TooMany` beyond the largest file."""
        self.size += len(piece)
        if self.size > (most := self._store.config.file_bytes):
            raise TooMany(f"the file has more than {most} bytes, which is the most")
        self._store.check_room(self._path.parents[1], len(piece))
        try:
            while piece:
                piece = piece[os.write(self._lock.descriptor, piece) :]
        except OSError as error:
            raise StorageFull(f"the file can't be written: {error.strerror}") from None

    def finish(self, filename: str, purpose: str, now: int, expires_at: int) -> StoredFile:
        """Make the file visible. Raises `StorageFull`."""
        stored = StoredFile(self._path.name, self.size, now, filename, purpose, expires_at)
        try:
            os.fsync(self._lock.descriptor)
            self._part.rename(self._path)
            self._store.show(self._path, stored)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise StorageFull(f"the file can't be written: {error.strerror}") from None
        self._lock.release()
        return stored

    def abandon(self) -> None:
        """Idempotent; nothing after `finish`."""
        self._part.unlink(missing_ok=True)
        self._lock.release()


class InputLine(msgspec.Struct):
    """A line of an input, whose body is left as it is."""

    custom_id: str
    method: Any = "POST"
    url: Any = ""
    body: msgspec.Raw = msgspec.Raw(b"")


class AnsweredLine(msgspec.Struct):
    """What counts of a line of an output."""

    id: str


class CheckedInput(NamedTuple):
    starts: array[int]
    """Where each request begins in the file, and where the last one ends."""
    problems: list[BatchProblem]


def check_input(path: Path, max_lines: int, max_bytes: int) -> CheckedInput:
    """Look through an input. What can't be a batch is a problem; a request that can't be served isn't. Raises
    `OSError`."""
    starts, problems, known = array("Q"), list[BatchProblem](), set[str]()
    at = rested = 0
    with path.open("rb") as source:
        for number, line in enumerate(iter(partial(source.readline, max_bytes + 1), b""), 1):
            begin, at = at, at + len(line)
            if number > 2 * max_lines:
                problems.append(BatchProblem("too_many_requests", f"there are more than {2 * max_lines} lines"))
                break
            if at - rested > REST_BYTES:
                rested = at
                time.sleep(REST_S)
            if not line.strip():
                continue
            try:
                if len(line) > max_bytes:
                    raise ValueError(f"the line has more than {max_bytes} bytes, which is the most")
                name = msgspec.json.decode(line, type=InputLine).custom_id
                if not 0 < len(name) <= MAX_CUSTOM_ID:
                    raise ValueError(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters")
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                problems.append(BatchProblem("invalid_json_line", f"the line can't be read: {error}"[:300], number))
                if len(line) > max_bytes or len(problems) >= MAX_PROBLEMS:
                    break
                continue
            if name in known:
                text = f"custom_id {name[:64]!r} is in an earlier line too"
                problems.append(BatchProblem("duplicate_custom_id", text, number, "custom_id"))
            known.add(name)
            starts.append(begin)
            if len(starts) > max_lines:
                problems.append(BatchProblem("too_many_requests", f"there are more than {max_lines} requests"))
            if len(problems) >= MAX_PROBLEMS or len(starts) > max_lines:
                break
    if not starts and not problems:
        problems.append(BatchProblem("empty_file", "the file has no request"))
    starts.append(at)
    return CheckedInput(starts, problems)


class AnswerLog:
    """The output and the errors of a batch, to which lines are appended. Raises `OSError` where they can't be read."""

    def __init__(self, paths: Sequence[Path], ids: str, total: int) -> None:
        """`paths`: of the output and of the errors. `ids`: how the id of a line begins, its number behind it."""
        self.done = bytearray(total)
        self.counts = [0, 0]
        """Lines of each file."""
        self._files: list[int] = []
        try:
            for path in paths:
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._ends = [self._recover(which, ids) for which in (0, 1)]
        except OSError:
            self.close()
            raise

    def _recover(self, which: int, ids: str) -> int:
        """Take in the whole lines of a file, and cut off what follows; returns its length."""
        end = rested = 0
        with os.fdopen(os.dup(self._files[which]), "rb") as source:
            for line in source:
                number = self._number(line, ids)
                if number is None or self.done[number]:
                    break
                self.done[number] = 1
                self.counts[which] += 1
                end += len(line)
                if end - rested > REST_BYTES:
                    rested = end
                    time.sleep(REST_S)
        os.ftruncate(self._files[which], end)
        return end

    def _number(self, line: bytes, ids: str) -> int | None:
        """The number of the request that a line answers; None where it is no whole line of this batch."""
        if not line.endswith(b"\n"):
            return None
        try:
            found = msgspec.json.decode(line, type=AnsweredLine).id
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        number = found.removeprefix(ids)
        return int(number) if number != found and number.isdecimal() and int(number) < len(self.done) else None

    def append(self, lines: Sequence[tuple[int, int, bytes]]) -> None:
        """Append lines (the number, the file, the bytes) and sync them, but for those that are there. Raises `OSError`,
        having appended none."""
        lines = [line for line in lines if not self.done[line[0]]]
        parts = [b"".join([line for _, where, line in lines if where == which]) for which in (0, 1)]
        try:
            for file, end, part in zip(self._files, self._ends, parts, strict=True):
                wrote = 0
                while wrote < len(part):
                    wrote += os.pwrite(file, part[wrote:], end + wrote)
            for file, part in zip(self._files, parts, strict=True):
                if part:
                    os.fdatasync(file)
        except OSError:
            for file, end in zip(self._files, self._ends, strict=True):
                os.ftruncate(file, end)
            raise
        for number, which, _ in lines:
            self.done[number] = 1
            self.counts[which] += 1
        self._ends = [end + len(part) for end, part in zip(self._ends, parts, strict=True)]

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
