"""The form in which metrics are written: OpenMetrics where the scraper would rather have it, else Prometheus' text.

The library's own choice replaces the colon of ``vllm:...`` in OpenMetrics, as if it weren't allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, cast

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_KIND = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_KIND = "text/plain; version=0.0.4; charset=utf-8"
# Both ask nothing of a registry but `collect`.
_plain = cast(Callable[[Any], bytes], generate_latest)
_encode = cast(Callable[[Any], bytes], partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8))


class Families(Protocol):
    """What has metrics to write."""

    def collect(self) -> Iterable[Metric]: ...


def wants_openmetrics(accept: str) -> bool:
    """Return whether a scrape would rather have OpenMetrics; `accept`: its header, which may be empty."""
    wanted = {kind: weight for kind, weight in map(_weighed, accept.split(",")) if kind}
    text = max(wanted.get(kind, 0.0) for kind in ("text/plain", "text/*", "*/*"))
    return wanted.get(OPENMETRICS, 0.0) > 0 and wanted[OPENMETRICS] >= text


def expose(families: Families, *, opened: bool) -> tuple[bytes, str]:
    """Return all metrics and their content type. `opened`: in OpenMetrics."""
    return (_encode(families), OPENMETRICS_KIND) if opened else (_plain(families), TEXT_KIND)


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
