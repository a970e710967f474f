"""One streamed request against an OpenAI endpoint, timed as its bytes arrive.

The client must not be what is measured, so there is no client library in the way: a request is one connection, its
bytes are parsed as the event loop delivers them (httptools in C for HTTP, `SseReader` for its events), and nothing is
scheduled between a token's arrival and its time stamp. Connecting is part of a request's time; on one machine that is
about 0.1 ms.

A stream counts as a success only if it ended with ``[DONE]`` and carried no error event. For servers that never send
it, an `Endpoint` with `needs_done=False` takes a whole HTTP answer with a finish reason instead.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx
import orjson

from twinpool.contracts.compact_json import DONE, SseReader
from twinpool.contracts.outside_data import read_json

_NOTE_CHARS = 200


class EndpointError(Exception):
    """Raised when an endpoint can't be used at all, in one line that says why."""


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI server answers. `path` comes before ``/v1``."""

    host: str
    port: int
    tls: bool
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    needs_done: bool = True

    @classmethod
    def parse(cls, url: str, headers: Sequence[tuple[str, str]] = (), needs_done: bool = True) -> Endpoint:
        """``http://host:port``, with or without ``/v1``. Raises `EndpointError` for other schemes."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(f"an endpoint is http://HOST:PORT or https://HOST:PORT; got {url}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path, tuple(headers), needs_done)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"

    def encode(self, path: str, body: dict[str, Any]) -> bytes:
        """The request as bytes, ready to send."""
        content = orjson.dumps(body)  # Quick: nothing else happens meanwhile, and tokens may be arriving.
        lines = [
            f"POST {self.path}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(content)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A plain JSON call, for what is not measured. Raises `EndpointError`."""
        try:
            async with httpx.AsyncClient(timeout=120, headers=list(self.headers)) as client:
                reply = await client.request(method, self.url + path, json=body)
                reply.raise_for_status()
                return reply.json()
        except httpx.HTTPStatusError as error:
            text = error.response.text[:_NOTE_CHARS]
            raise EndpointError(f"{method} {self.url + path} answered {error.response.status_code}: {text}") from None
        except (httpx.HTTPError, ValueError) as error:
            raise EndpointError(f"{method} {self.url + path} failed: {str(error) or type(error).__name__}") from None

    async def first_model(self) -> str:
        """The first model that the server lists."""
        answer = await self.ask("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise EndpointError(f"{self.url}/v1/models lists no model; name one with --model") from None


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds of `time.perf_counter`."""

    due_s: float
    sent_s: float
    input_tokens: int
    wanted_tokens: int
    end_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """When each event with new tokens arrived."""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    """Prompt tokens that the server says it did not have to compute."""
    completion_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    """The answer's tokens, where the server was asked for them (``return_token_ids``)."""
    error: str | None = None
    """The kind of error; None for an answer that ended as it should."""
    note: str = ""
    held_s: float = 0.0
    """Seconds for which it was due and waited, as too many others were under way."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def lag_s(self) -> float:
        """Seconds by which the client itself was late."""
        return self.sent_s - self.due_s - self.held_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def output_tokens(self) -> int:
        """As the server counts them, else the events with tokens."""
        return self.completion_tokens if self.completion_tokens is not None else len(self.arrivals_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no second."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)


class _Exchange(asyncio.Protocol):
    """One request and its streamed answer; `ended` is set when nothing more will come."""

    def __init__(self, request: bytes, outcome: Outcome, needs_done: bool = True) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._outcome = outcome
        self._parser = httptools.HttpResponseParser(self)
        self._events = SseReader()
        self._body = b""
        self._streams = False
        self._needs_done = needs_done
        self._finished = False
        self._now = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish("not HTTP", str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = time.perf_counter()
        if exc is not None:
            self._finish("connection lost", str(exc))
        else:
            self._finish("cut", "the stream ended without [DONE]")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streams = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200 or not self._streams:
            self._body += body
            return
        for data in self._events.feed(body):
            self._event(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._finish(f"http {status}", self._body.decode(errors="replace"))
        elif not self._streams:
            self._finish("not a stream", self._body.decode(errors="replace"))
        elif self._finished and not self._needs_done:
            self._finish_well()
        elif self._finished:
            self._finish("no [DONE]", "the stream said why it ended, and had no [DONE]")
        else:
            self._finish("cut", "the stream ended without [DONE]")

    def _event(self, data: bytes) -> None:
        if self.ended.done():
            return
        if data == DONE:
            self._finish_well()
            return
        try:
            event = read_json(data)
            failed = event.get("error")
            carried = not failed and carries_tokens(event)
            self._finished |= any(choice.get("finish_reason") for choice in event.get("choices") or ())
            tokens = [token for choice in event.get("choices") or () for token in choice.get("token_ids") or ()]
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            self._finish("bad event", f"{error!r} in {data[:80]!r}")
            return
        if failed:
            kind = failed.get("type") or failed.get("code") if isinstance(failed, dict) else None
            self._finish(f"error event{f' ({kind})' if kind else ''}", json.dumps(failed))
            return
        if carried:
            self._outcome.arrivals_s.append(self._now)
            self._outcome.token_ids += tokens
        usage = event.get("usage")
        if usage:
            self._outcome.prompt_tokens = usage.get("prompt_tokens")
            self._outcome.completion_tokens = usage.get("completion_tokens")
            self._outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _finish_well(self) -> None:
        self._finish(None if self._outcome.arrivals_s else "no tokens", "")

    def _finish(self, error: str | None, note: str) -> None:
        if self.ended.done():
            return
        self._outcome.end_s = self._now or time.perf_counter()
        self._outcome.error = error
        self._outcome.note = note[:_NOTE_CHARS]
        self.ended.set_result(None)
        self.abort()


def carries_tokens(event: dict[str, Any]) -> bool:
    """Whether an event of either endpoint brings new tokens (a chat stream opens with a role and no token)."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if choice.get("token_ids"):
            return True
        if delta is None:
            if choice.get("text") or choice.get("finish_reason") is None:
                return True
        elif any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


async def stream(endpoint: Endpoint, request: bytes, outcome: Outcome, timeout_s: float) -> Outcome:
    """Send `request` (from `Endpoint.encode`) now and follow its answer to the end; never raises for the server."""
    loop = asyncio.get_running_loop()
    outcome.sent_s = time.perf_counter()
    exchange: _Exchange | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, exchange = await loop.create_connection(
                lambda: _Exchange(request, outcome, endpoint.needs_done),
                endpoint.host,
                endpoint.port,
                ssl=ssl.create_default_context() if endpoint.tls else None,
            )
            await exchange.ended
    except TimeoutError:
        outcome.error, outcome.note = "timeout", f"not finished after {timeout_s} s"
    except OSError as error:
        outcome.error, outcome.note = "no connection", str(error)[:_NOTE_CHARS]
    finally:
        if exchange is not None:
            exchange.abort()
    if outcome.end_s == 0.0:
        outcome.end_s = time.perf_counter()
    return outcome
