"""What the server offers beside ASGI's coroutines, as functions in the scope's extensions, and answers for HTTP/1.0.

`send` and `receive` are coroutines: each event of a stream would have to wake the task that awaits it, which takes
longer than making the event, and each request would need a task of its own that waits for the client to leave. Servers
without these extensions, and pieces that `DIRECT_WRITE` doesn't take, are served through `send` and `receive`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from twinpool.router.api.asgi_exchange import DIRECT_WRITE, ON_GONE, AsgiMessage, AsgiScope


class LeavingCalls:
    """The calls to be made when the client of one connection leaves, by the request whose answer isn't complete."""

    def __init__(self) -> None:
        self._calls: dict[RequestResponseCycle, list[Callable[[], object]]] = {}

    def add(self, cycle: RequestResponseCycle, call: Callable[[], object]) -> None:
        """Have `call` called when the client leaves; at once where it has."""
        if cycle.disconnected:
            call()
        elif not cycle.response_complete:
            self._calls.setdefault(cycle, []).append(call)

    def answered(self) -> None:
        """Forget the requests whose answers are complete."""
        for cycle in [cycle for cycle in self._calls if cycle.response_complete]:
            del self._calls[cycle]

    def left(self) -> None:
        """Make the calls: the client has left. Idempotent."""
        gone, self._calls = self._calls, {}
        for calls in gone.values():
            for call in calls:
                call()


def offer_extensions(cycle: RequestResponseCycle, leaving: LeavingCalls) -> None:
    """Put the extensions into the scope of a request."""

    def write(piece: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    extensions: dict[str, Any] = {DIRECT_WRITE: write, ON_GONE: lambda call: leaving.add(cycle, call)}
    cast(AsgiScope, cycle.scope)["extensions"] = extensions


def answer_http_1_0(cycle: RequestResponseCycle, *, keeps: bool) -> None:
    """Have the answer to an HTTP/1.0 request be one that its client can read: never in chunks, which HTTP/1.0 doesn't
    have, and without ``100 Continue``.

    A body without ``content-length``, a stream's, ends with the connection. `keeps`: the client has asked for the
    connection to stay open (``Connection: keep-alive``); it does where the body has a length.
    """
    cycle.waiting_for_100_continue = False
    send = cycle.send
    until_close = False

    async def sized(message: AsgiMessage) -> None:
        nonlocal until_close
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in (*cycle.default_headers, *headers)}
            if b"content-length" not in names:
                until_close, cycle.chunked_encoding = True, False
            elif keeps and b"connection" not in names:
                cycle.keep_alive = True
                message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
        elif until_close:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast(Any, message))

    cast(Any, cycle).send = sized
