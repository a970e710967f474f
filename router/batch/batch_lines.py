"""The bytes of files: of an upload, of the lines of a batch's input, and of those that were answered.

An input isn't read whole: it is looked through once, of each request it is remembered where it begins and which model
it names, and its body is left as it is for whoever reads requests. An output is its own journal: lines are only
appended, each with the number of its request in its id, so what a crash leaves says by itself which requests have an
answer.
"""

from __future__ import annotations

import heapq
import os
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from twinpool.router.batch.batch_store import (
    BatchProblem,
    BatchStore,
    StorageFull,
    StoredFile,
    TooMany,
    locked_new,
)
from twinpool.router.openai.api_errors import ApiError

if TYPE_CHECKING:
    from twinpool.router.service.router_service import RouterService

MAX_CUSTOM_ID = 512
MAX_PROBLEMS = 50
"""Problems of an input that are told; further ones aren't looked for."""
NO_MODEL = 255
"""The place of a request that names no model of here: it is asked at once, as it only gets an error."""
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


class NamedModel(msgspec.Struct):
    """The one field of a body that says whose it is; the others are skipped, unread."""

    model: Any = None


MODEL_OF = msgspec.json.Decoder(NamedModel)
"""Raises `NO_OBJECT` where a body is no JSON object."""
NO_OBJECT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ModelChoice(Protocol):
    """The models of an endpoint, by place."""

    @property
    def services(self) -> Sequence[RouterService]: ...
    def places(self) -> Mapping[str, int] | None:
        """Return which of `services` has each name, adapters' included; None where there is one, whatever is named."""
        ...

    def of_line(self, body: bytes, tenant: str) -> RouterService | ApiError:
        """Return the service of the model that a body names, or why the tenant may not use it. Raises `RequestError`
        where none has that name."""
        ...


class OneModel:
    """The choice where there is none: the service's reader says which name is wrong."""

    def __init__(self, service: RouterService) -> None:
        self.services = (service,)

    def places(self) -> None:
        return None

    def of_line(self, body: bytes, tenant: str) -> RouterService:
        return self.services[0]


class AnsweredLine(msgspec.Struct):
    """What counts of a line of an output."""

    id: str


class CheckedInput(NamedTuple):
    starts: array[int]
    """Where each request begins in the file, and where the last one ends."""
    problems: list[BatchProblem]
    models: bytearray
    """Of each request the place of its model, or `NO_MODEL`."""


def check_input(path: Path, max_lines: int, max_bytes: int, places: Mapping[str, int] | None = None) -> CheckedInput:
    """Look through an input. What can't be a batch is a problem; a request that can't be served isn't. `places`: of
    each model by its name; None where there is one, which has place 0. Raises `OSError`."""
    starts, problems, known, models = array("Q"), list[BatchProblem](), set[str](), bytearray()
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
                read = msgspec.json.decode(line, type=InputLine)
                name = read.custom_id
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
            models.append(0 if places is None else _place(read.body, places))
            if len(starts) > max_lines:
                problems.append(BatchProblem("too_many_requests", f"there are more than {max_lines} requests"))
            if len(problems) >= MAX_PROBLEMS or len(starts) > max_lines:
                break
    if not starts and not problems:
        problems.append(BatchProblem("empty_file", "the file has no request"))
    starts.append(at)
    return CheckedInput(starts, problems, models)


def _place(body: msgspec.Raw, places: Mapping[str, int]) -> int:
    try:
        model = MODEL_OF.decode(body).model
    except NO_OBJECT:
        return NO_MODEL
    return places.get(model, NO_MODEL) if isinstance(model, str) else NO_MODEL


def line_refusal(line: InputLine, endpoint: str) -> ApiError | None:
    """Return why a request can't be asked; None where it can."""
    if line.method != "POST":
        return ApiError(400, "method must be POST", "invalid_request_error", "invalid_method", "method")
    if line.url != endpoint:
        text = f"url must be the batch's endpoint, {endpoint}"
        return ApiError(400, text, "invalid_request_error", "invalid_url", "url")
    return None


def answered_line(
    line_id: str, name: str, request_id: str, answer: bytes | ApiError, error: dict[str, str] | None = None
) -> bytes:
    """Return a line of an output: what was answered, with a failure's status, or by `error` why nothing was."""
    response = None
    if error is None:
        status, body = (answer.status, answer.to_json()) if isinstance(answer, ApiError) else (200, answer)
        raw = msgspec.Raw(body if b"\n" not in body else msgspec.json.encode(msgspec.json.decode(body)))
        response = {"status_code": status, "request_id": request_id, "body": raw}
    return msgspec.json.encode({"id": line_id, "custom_id": name, "response": response, "error": error}) + b"\n"


class LineQueue:
    """The numbers of one model's requests that are to be asked, in the order of the file, and those that are to be
    asked again, when their time has come."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._next = iter(numbers)
        self._again: list[tuple[float, int]] = []

    def due(self, now: float) -> int | None:
        """Take the number that is next; None where there is none now."""
        if self._again and self._again[0][0] <= now:
            return heapq.heappop(self._again)[1]
        return next(self._next, None)

    def later(self, number: int, at: float) -> None:
        """Have a request asked again at `at`."""
        heapq.heappush(self._again, (at, number))


def queues_of(models: Sequence[int], done: Sequence[int]) -> dict[int, LineQueue]:
    """Return the requests without an answer by the place of their model."""
    left: dict[int, list[int]] = {place: [] for place in sorted(set(models))}
    for number, place in enumerate(models):
        if not done[number]:
            left[place].append(number)
    return {place: LineQueue(numbers) for place, numbers in left.items()}


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
