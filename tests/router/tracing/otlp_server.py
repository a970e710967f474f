"""A plain server of OTLP over HTTP that keeps the spans it is sent, decoded by OpenTelemetry's own definitions."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpServer:
    """The server; it runs within its context."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.came = threading.Semaphore(0)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                server.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()
                server.came.release()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.base}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[tuple[str, Span]]:
        """All spans, each with the process that its resource names."""
        return [
            (attributes_of(resource.resource.attributes)["service.instance.id"], span)
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def root(self, trace_id: str) -> Span:
        """Wait for one more call, and return the one root of a trace."""
        self.came.acquire(timeout=60)
        (root,) = [span for _, span in self.spans() if span.trace_id.hex() == trace_id and span.name == "request demo"]
        return root


def attributes_of(attributes: Any) -> dict[str, Any]:
    """Attributes by name, of their own types."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
