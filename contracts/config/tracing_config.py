"""Configuration section of traces: where they are exported to, and how many."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracingConfig:
    endpoint: str = ""
    """URL to which routers send traces of requests, by OTLP over HTTP, such as http://collector:4318/v1/traces. Empty:
    none are made. Needs the package's extra `otel`. What else a collector wants, such as a header with a token, is read
    from OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS) in the environment of `serve`."""
    ratio: float = 1.0
    """Share of the requests that are traced, of those whose client says nothing of it; a client that sends the header
    traceparent decides for its own."""
    queue: int = 2048
    """Requests whose traces may wait for the collector; further ones are dropped and counted."""
    timeout_s: float = 5.0
    """Seconds that the collector may take for one call, with all tries; then its traces are dropped and counted."""
