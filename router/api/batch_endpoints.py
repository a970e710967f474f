"""OpenAI's endpoints of files and batches: uploads as they come, lists, contents, and the life of batches.

An upload is a multipart form (RFC 7578) that is written while it is received: what of it is in memory is a piece of the
body and a field's few bytes. Its fields may come in any order; the file is visible once all of them are right. What
blocks runs in the threads of the runner.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from twinpool.contracts.errors import RequestError, TwinpoolError
from twinpool.contracts.outside_data import read_json
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.batch.batch_lines import Upload
from twinpool.router.batch.batch_runner import KINDS, BatchRunner
from twinpool.router.batch.batch_store import (
    BatchState,
    FileInUse,
    StorageFull,
    StoredBatch,
    StoredFile,
    TooMany,
)
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.request_fields import BOOLEAN, INTEGER, OBJECT, TEXT, Schema, array_of, object_of, or_null

MAX_UPLOADS = 8
"""Uploads that one router receives at a time, and half as many of one tenant."""
FIELD_BYTES, HEAD_BYTES, FORM_PARTS = 1024, 8192, 16
"""The most that a field that is no file may have, the headers of a part, and parts."""
FORM_BYTES = 64 * 1024
"""What a form may have beside its file."""
CONTENT_BYTES = 256 * 1024
"""Pieces in which a file's content is sent."""
MAX_LISTED = 10_000
SMALL_BODY = 64 * 1024
MAX_METADATA, METADATA_KEY, METADATA_VALUE = 16, 64, 512
SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON can name and no file can have."""
WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 30 * 86_400
LEAST_KEPT_S = 3600
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"]*)"')
_AFTER_MARK = re.compile(rb"--|[ \t]{0,128}\r\n")
_MAY_BECOME_THAT = re.compile(rb"-?|[ \t]{0,128}\r?")
"""What follows a boundary, else it is content that begins as one (RFC 2046, 5.1.1); and what may become that."""
_FILENAME = re.compile(rb'[;\s]filename="((?:[^"\\]|\\.)*)"')
FILES, BATCHES = "/v1/files", "/v1/batches"
PATHS = (FILES, BATCHES)
OFF = "files and batches are kept nowhere here: the operator sets batch.folder"


_FILE: Schema = object_of(
    "id object bytes created_at expires_at filename purpose status",
    id=TEXT,
    object={"const": "file"},
    bytes=INTEGER,
    created_at=INTEGER,
    expires_at=or_null(INTEGER),
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
)
_BATCH: Schema = object_of(
    "id object endpoint input_file_id status created_at request_counts",
    id=TEXT,
    object={"const": "batch"},
    endpoint=TEXT,
    errors=or_null(OBJECT),
    input_file_id=TEXT,
    completion_window=TEXT,
    status=TEXT,
    output_file_id=or_null(TEXT),
    error_file_id=or_null(TEXT),
    created_at=INTEGER,
    request_counts=OBJECT,
    metadata=or_null(OBJECT),
)
BATCH_SCHEMAS: dict[str, Schema] = {
    "File": _FILE,
    "Batch": _BATCH,
    **{
        f"{name}s": object_of("object data has_more", object={"const": "list"}, data=array_of(of), has_more=BOOLEAN)
        for name, of in (("File", _FILE), ("Batche", _BATCH))
    },
}
"""Answers by name, for `/openapi.json`."""


_STATUSES = (408, 431, 500, 503, 401, 403, 400, 404, 409, 413, 415, 507)
BATCH_PATHS: dict[str, tuple[str, str, tuple[int, ...], str, str]] = {
    "/v1/files": ("Your files, and upload of one", "Files", _STATUSES, "get post", "purpose limit after order"),
    "/v1/files/{file}": ("A file, its content below it, and its end", "File", _STATUSES, "get delete", ""),
    "/v1/batches": ("Your batches, and a new one", "Batches", _STATUSES, "get post", "limit after"),
    "/v1/batches/{batch}": ("A batch; below it, its end", "Batch", _STATUSES, "get post", ""),
}
"""What `/openapi.json` says of each path: for what it is, the answer, statuses of errors, methods, parameters."""


class BatchEndpoints:
    """The handlers of one router. `runner`: None where no folder is configured."""

    def __init__(self, runner: BatchRunner | None) -> None:
        self._runner = runner
        self._uploads: list[str] = []
        """The tenants whose uploads are being received."""

    async def answer(self, exchange: HttpExchange) -> None:
        """Answer a request of a path below one of `PATHS`."""
        below = exchange.path.removeprefix(next(path for path in PATHS if exchange.path.startswith(path)))
        posted = exchange.method == "POST"
        if exchange.path.startswith(FILES):
            handler = self._file if below else self._upload if posted else self._files
        else:
            handler = self._batch if below else self._create if posted else self._batches
        try:
            if self._runner is None:
                raise _Refused(_invalid(OFF, status=404, code="not_configured"))
            await handler(self._runner, exchange)
        except (StorageFull, TooMany, FileInUse, _Refused, OSError, RequestError) as error:
            await (exchange.refuse_body if posted and not exchange.body_done else exchange.fail)(_failure(error))

    # ------------------------------------------------------------ files

    async def _upload(self, runner: BatchRunner, exchange: HttpExchange) -> None:
        tenant = exchange.tenant
        found = _BOUNDARY.match(exchange.header(b"content-type"))
        if found is None:
            raise _Refused(
                _invalid("send a form: Content-Type: multipart/form-data, with purpose and file", status=415)
            )
        if too_many_uploads(self._uploads, tenant):
            raise _Refused(ApiError(503, "too many uploads at once; try again later", "server_error", "busy", None, 5))
        self._uploads.append(tenant)
        upload: Upload | None = None
        try:
            upload = await runner.thread(partial(Upload, runner.store, tenant))
            form = FormReader(f"--{found[1] or found[2]}".encode("latin-1"))
            async for piece in exchange.pieces(runner.store.config.file_bytes + FORM_BYTES):
                for part in form.feed(piece):
                    await runner.thread(partial(upload.write, part))
            stored = await self._finish(runner, upload, form)
        finally:
            self._uploads.remove(tenant)
            if upload is not None:
                await runner.thread(upload.abandon)
        await exchange.answer_json(200, _shown_file(stored))

    async def _finish(self, runner: BatchRunner, upload: Upload, form: FormReader) -> StoredFile:
        if not form.ended:
            raise _Refused(_invalid("the form has no end"))
        if form.filename is None:
            raise _Refused(_invalid("the form has no file", "file"))
        if (purpose := form.fields.get("purpose", "")) != "batch":
            raise _Refused(_invalid(f"purpose must be batch, got {purpose[:64]!r}", "purpose"))
        kept_s = runner.store.config.keep_s
        if "expires_after[seconds]" in form.fields or "expires_after[anchor]" in form.fields:
            text, anchor = form.fields.get("expires_after[seconds]", ""), form.fields.get("expires_after[anchor]", "")
            if anchor != "created_at" or not re.fullmatch("[0-9]{1,9}", text, re.ASCII):
                raise _Refused(_invalid("expires_after takes anchor created_at, and seconds", "expires_after"))
            if not min(LEAST_KEPT_S, kept_s) <= int(text) <= kept_s:
                raise _Refused(_invalid(f"seconds must be from {LEAST_KEPT_S} to {kept_s}", "expires_after"))
            kept_s = int(text)
        now = int(runner.now())
        return await runner.thread(partial(upload.finish, form.filename, "batch", now, now + kept_s))

    async def _files(self, runner: BatchRunner, exchange: HttpExchange) -> None:
        asked = _query(exchange, "purpose", "limit", "after", "order")
        found = await runner.thread(partial(runner.store.files, exchange.tenant))
        kept = [one for one in found if asked.get("purpose", one.purpose) == one.purpose]
        if asked.get("order", "desc") not in ("asc", "desc"):
            raise _Refused(_invalid("order must be asc or desc", "order"))
        if asked.get("order") == "asc":
            kept.reverse()
        await exchange.answer_json(200, _page([_shown_file(one) for one in kept], asked, MAX_LISTED))

    async def _file(self, runner: BatchRunner, exchange: HttpExchange) -> None:
        file_id, _, rest = exchange.path.removeprefix("/v1/files/").partition("/")
        if rest not in ("", "content") or (rest and exchange.method == "DELETE"):
            raise _Refused(_missing(exchange.path))
        if exchange.method == "DELETE":
            if not await runner.thread(partial(runner.store.delete_file, exchange.tenant, file_id)):
                raise _Refused(_missing(file_id))
            await exchange.answer_json(200, {"id": file_id, "object": "file", "deleted": True})
            return
        found = await runner.thread(partial(runner.store.file, exchange.tenant, file_id))
        if found is None:
            raise _Refused(_missing(file_id))
        if not rest:
            await exchange.answer_json(200, _shown_file(found[0]))
            return
        source = await runner.thread(partial(_opened, found[1]))
        try:
            await exchange.answer_pieces(found[0].bytes, lambda: runner.thread(lambda: source.read(CONTENT_BYTES)))
        finally:
            await runner.thread(source.close)

    # ------------------------------------------------------------ batches

    async def _create(self, runner: BatchRunner, exchange: HttpExchange) -> None:
        exchange.require_json()
        body = await _body(exchange)
        endpoint, input_id, window = (body.get(name) for name in ("endpoint", "input_file_id", "completion_window"))
        if endpoint not in KINDS:
            raise _Refused(_invalid(f"endpoint must be one of {', '.join(KINDS)}", "endpoint"))
        fit = WINDOW.fullmatch(window) if isinstance(window, str) else None
        seconds = int(fit[1]) * UNITS_S[fit[2]] if fit is not None else 0
        if not 0 < seconds <= MAX_WINDOW_S:
            raise _Refused(_invalid("completion_window must be a time such as 24h, at most 30d", "completion_window"))
        metadata = _metadata(body.get("metadata"))
        if body.get("output_expires_after") is not None:
            raise _Refused(
                _invalid("output_expires_after isn't here: outputs are kept for batch.keep_s", "output_expires_after")
            )
        exchange.ignored = [name for name in body if name not in _OF_BATCH and name.isidentifier()][:16]
        found = None
        if isinstance(input_id, str):
            found = await runner.thread(partial(runner.store.file, exchange.tenant, input_id))
        if not isinstance(input_id, str) or found is None or found[0].purpose != "batch":
            raise _Refused(_invalid("input_file_id names no file of yours with the purpose batch", "input_file_id"))
        make = partial(runner.store.create, exchange.tenant, input_id, endpoint, str(window), seconds, metadata)
        batch = await runner.thread(make)
        runner.look()
        await exchange.answer_json(200, _shown_batch(batch))

    async def _batches(self, runner: BatchRunner, exchange: HttpExchange) -> None:
        asked = _query(exchange, "limit", "after")
        found = await runner.thread(partial(runner.store.batches, exchange.tenant))
        await exchange.answer_json(200, _page([_shown_batch(one) for one in found], asked, 20, 100))

    async def _batch(self, runner: BatchRunner, exchange: HttpExchange) -> None:
        batch_id, _, rest = exchange.path.removeprefix("/v1/batches/").partition("/")
        if rest != ("cancel" if exchange.method == "POST" else ""):
            raise _Refused(_missing(exchange.path))
        if rest:
            await _body(exchange, empty=True)
        call = runner.store.cancel if rest else runner.store.batch
        batch = await runner.thread(partial(call, exchange.tenant, batch_id))
        if batch is None:
            raise _Refused(_missing(batch_id))
        await exchange.answer_json(200, _shown_batch(batch))


class _Refused(TwinpoolError):
    """Raised where a request is refused, with the answer."""

    def __init__(self, failure: ApiError) -> None:
        super().__init__(failure.message)
        self.failure = failure


class FormReader:
    """A multipart form as it comes: pieces of the body in, pieces of the file out; other fields are kept."""

    def __init__(self, mark: bytes) -> None:
        """`mark`: two dashes and the boundary."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.ended = False
        self._mark, self._held = b"\r\n" + mark, b"\r\n"
        self._in_head, self._name = False, ""
        self._into_file = False
        self._value, self._parts = b"", 0
        self._begun = False
        self._skip = 0
        """How many bytes of the line break in front of a content are left, which is the boundary's if that is empty."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece of the body; returns what of the file is in it. Raises `RequestError` for what is no form."""
        self._held += piece
        out: list[bytes] = []
        while not self.ended:
            if self._in_head:
                head, blank, rest = self._held.partition(b"\r\n\r\n")
                if self._held.startswith(b"--"):
                    self.ended = True
                elif blank:
                    self._held = rest
                    self._open(head)
                    continue
                elif len(self._held) > HEAD_BYTES:
                    raise RequestError("the headers of a part of the form are too long")
                break
            content, mark, rest = self._held.partition(self._mark)
            if not mark:  # The mark may have come in part.
                safe = max(0, len(self._held) - len(self._mark))
                content, rest = self._held[:safe], self._held[safe:]
            elif not _AFTER_MARK.match(rest):
                if _MAY_BECOME_THAT.fullmatch(rest):
                    rest, mark = mark + rest, b""
                else:
                    self._take(content + mark, out)
                    self._held = rest
                    continue
            self._held = rest
            self._take(content, out)
            if not mark:
                break
            self._close()
        if self.ended:
            self._held = b""
        return out

    def _take(self, content: bytes, out: list[bytes]) -> None:
        skipped = min(self._skip, len(content))
        content, self._skip = content[skipped:], self._skip - skipped
        if self._into_file and content:
            out.append(content)
        elif self._begun:
            self._value += content
            if len(self._value) > FIELD_BYTES:
                raise RequestError(f"the field {self._name[:64]!r} of the form is too long")

    def _close(self) -> None:
        """End a part, and begin the headers of the next."""
        if self._begun and not self._into_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        self._in_head, self._value, self._into_file = True, b"", False
        self._parts += 1
        if self._parts > FORM_PARTS:
            raise RequestError("the form has too many parts")

    def _open(self, head: bytes) -> None:
        """Begin the content of a part."""
        if (found := _NAME.search(head)) is None:
            raise RequestError("a part of the form has no name")
        self._name, self._in_head, self._begun = found[1].decode("utf-8", "replace"), False, True
        self._held, self._skip = b"\r\n" + self._held, 2
        if self._name == "file":
            if self.filename is not None:
                raise RequestError("the form has more than one file", param="file")
            named = _FILENAME.search(head)
            raw = named[1].decode("utf-8", "replace") if named is not None else "file.jsonl"
            self.filename = "".join(one for one in raw if one.isprintable())[-255:]
            self._into_file = True


def too_many_uploads(tenants: list[str], tenant: str) -> bool:
    """Whether one of `tenant` has to wait while those of `tenants` are being received."""
    return len(tenants) >= MAX_UPLOADS or 2 * tenants.count(tenant) >= MAX_UPLOADS


_OF_BATCH = ("endpoint", "input_file_id", "completion_window", "metadata", "output_expires_after")


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


async def _body(exchange: HttpExchange, *, empty: bool = False) -> dict[str, Any]:
    raw = b"".join([piece async for piece in exchange.pieces(SMALL_BODY)])
    if empty and not raw.strip():
        return {}
    try:
        tree = read_json(raw)
    except ValueError as error:
        raise _Refused(_invalid(f"the body isn't JSON: {error}"[:300])) from None
    if not isinstance(tree, dict):
        raise _Refused(_invalid("the body must be an object"))
    return tree


def _metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    fits = isinstance(given, dict) and len(given) <= MAX_METADATA and all(
        isinstance(value, str) and len(key) <= METADATA_KEY and len(value) <= METADATA_VALUE
        and not SURROGATE.search(key + value)
        for key, value in given.items()
    )  # fmt: skip
    if not fits:
        text = f"metadata has at most {MAX_METADATA} keys of {METADATA_KEY} characters, with texts of {METADATA_VALUE}"
        raise _Refused(_invalid(text, "metadata"))
    assert isinstance(given, dict)
    return given


def _query(exchange: HttpExchange, *known: str) -> dict[str, str]:
    """The parameters that are known; others are named as ignored."""
    try:
        asked = dict(parse_qsl(exchange.query.decode("latin-1"), max_num_fields=32)) if exchange.query else {}
    except ValueError as error:
        raise _Refused(_invalid(f"the query can't be read: {error}")) from None
    exchange.ignored = [name for name in asked if name not in known and name.isascii() and name.isidentifier()][:16]
    return {name: asked[name] for name in known if name in asked}


def _page(shown: list[dict[str, Any]], asked: dict[str, str], usual: int, most: int | None = None) -> dict[str, Any]:
    """A part of a list: what follows `after`, `limit` of it."""
    text, most = asked.get("limit", str(usual)), most or usual
    if not re.fullmatch("[0-9]{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise _Refused(_invalid(f"limit must be from 1 to {most}", "limit"))
    begin = 0
    if "after" in asked:
        places = [place for place, one in enumerate(shown) if one["id"] == asked["after"]]
        if not places:
            raise _Refused(_missing(asked["after"]))
        begin = places[0] + 1
    data = shown[begin : begin + int(text)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": begin + len(data) < len(shown)}


def _shown_file(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": stored.created_at,
        "expires_at": stored.expires_at,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }


def _shown_batch(batch: StoredBatch) -> dict[str, Any]:
    """A batch as OpenAI has it."""
    problems = [{name: getattr(one, name) for name in ("code", "message", "param", "line")} for one in batch.errors]
    shown = {name: name if name in batch.published else None for name in (batch.output_file_id, batch.error_file_id)}
    stamps = {f"{state}_at": batch.stamps.get(state) for state in BatchState if state is not BatchState.VALIDATING}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(batch.status),
        "output_file_id": shown[batch.output_file_id],
        "error_file_id": shown[batch.error_file_id],
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **stamps,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


def _invalid(message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> ApiError:
    return ApiError(status, message, "invalid_request_error", code, param)


def _missing(name: str) -> ApiError:
    return _invalid(f"there is no {name[:200]} of yours", status=404, code="not_found")


def _failure(error: Exception) -> ApiError:
    match error:
        case _Refused():
            return error.failure
        case StorageFull():
            return ApiError(507, str(error), "server_error", "storage_full")
        case FileInUse():
            return _invalid(str(error), status=409, code="conflict")
        case TooMany():
            return _invalid(str(error), status=400, code="limit_reached")
        case RequestError():
            return _invalid(str(error), error.param)
        case _:
            return ApiError(500, f"the folder of files can't be used: {error}", "server_error", "internal")
