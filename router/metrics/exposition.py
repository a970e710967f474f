"""The form in which metrics are written: OpenMetrics where the scraper would rather have it, else Prometheus' text.

The library's own choice replaces the colon of ``vllm:...`` in OpenMetrics, as if it weren't allowed there.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_KIND = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_KIND = "text/plain; version=0.0.4; charset=utf-8"
_encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)


def expose(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return all metrics and their content type. `accept`: the header of the scrape, which may be empty."""
    wanted = {kind: weight for kind, weight in map(_weighed, accept.split(",")) if kind}
    text = max(wanted.get(kind, 0.0) for kind in ("text/plain", "text/*", "*/*"))
    if wanted.get(OPENMETRICS, 0.0) > 0 and wanted[OPENMETRICS] >= text:
        return _encode(registry), OPENMETRICS_KIND
    return generate_latest(registry), TEXT_KIND


def _weighed(accepted: str) -> tuple[str, float]:
    """Return a media type that is accepted, and its weight from 0 to 1; of a weight that isn't a number 0."""
    kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return kind, float(parameter[2:])
            except ValueError:
                return kind, 0.0
    return kind, 1.0
