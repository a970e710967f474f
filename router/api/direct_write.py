"""A piece of an answer's body, written at once: an ASGI extension beside `send`.

`send` is a coroutine, so each event of a stream has to wake the task that awaits it: for one token of one stream that
takes longer than making the event. The extension is a plain function, under `DIRECT_WRITE` in the scope's extensions.
Servers without it, and pieces that it doesn't take, go through `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.api.asgi_exchange import DIRECT_WRITE, AsgiScope


def offer_direct_write(cycle: RequestResponseCycle) -> None:
    """Put the extension into the scope of a request."""

    def write(piece: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    extensions: dict[str, Callable[[bytes], bool]] = {DIRECT_WRITE: write}
    cast(AsgiScope, cycle.scope)["extensions"] = extensions
