"""An HTTP server with a router's admin endpoints and a worker table that a test fills."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar, overload


def row(name: str, state: str = "ready", **changes: Any) -> dict[str, Any]:
    values = {
        "name": name, "role": name.partition("-")[0], "state": state, "pid": 7, "node": "here", "incarnation": 1,
        "running": 0, "waiting": 0, "pages_total": 64, "pages_free": 64, "outgoing": 0,
        "counters": {"pages_evicted": 3.0},
    }  # fmt: skip
    return values | changes


class RouterStub:
    """`tables` are shown one a status call, the last for ever; `refusal` answers drain, undrain and check."""

    def __init__(self) -> None:
        self.tables: list[list[dict[str, Any]]] = [[row("prefill-0"), row("decode-0")]]
        self.refusal: tuple[int, str] | None = None
        self.report: dict[str, Any] = {"ok": True, "workers": []}
        self.ordered: list[dict[str, Any]] = []
        """The workers of the answer to an order that changes pools."""
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[Any] = []
        """What came with calls, where anything did."""
        self.url = ""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        self.calls.append((method, path))
        if path == "/cluster/status":
            return 200, {"workers": self.tables.pop(0) if len(self.tables) > 1 else self.tables[0]}
        if self.refusal is not None:
            return self.refusal[0], {"error": {"message": self.refusal[1]}}
        if path == "/cluster/check":
            return 200, self.report
        return 200, {"workers": self.ordered} if self.ordered else {}


Stub = TypeVar("Stub", bound=RouterStub)


@overload
def router_stub() -> AbstractContextManager[RouterStub]: ...


@overload
def router_stub(stub: Stub) -> AbstractContextManager[Stub]: ...


def router_stub(stub: RouterStub | None = None) -> AbstractContextManager[Any]:
    """A server that answers as `stub` says."""
    return _serving(stub if stub is not None else RouterStub())


@contextmanager
def _serving(stub: RouterStub) -> Iterator[RouterStub]:

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if length := int(self.headers.get("Content-Length") or 0):
                stub.bodies.append(json.loads(self.rfile.read(length)))
            status, body = stub.answer(self.command, self.path)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
