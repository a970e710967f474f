"""Prometheus metrics of the controllers, as this router is told of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.messages.control_plane import ControlPlane


def control_plane_metrics(reachable: bool, plane: ControlPlane | None) -> Iterator[Metric]:
    """Yield the families; but for the first only where controllers say who leads."""
    text = "1 while a controller tells this router of the workers"
    yield GaugeMetricFamily("twinpool_controller_up", text, value=int(reachable))
    if plane is None:
        return
    leader = GaugeMetricFamily("twinpool_controller_info", "1, by where the leader is reached", labels=["leader"])
    leader.add_metric([plane.leader], 1)
    yield leader
    yield CounterMetricFamily("twinpool_controller_terms", "Controllers that have led so far", value=plane.term)
    yield GaugeMetricFamily("twinpool_controller_standbys", "Controllers that wait to lead", value=len(plane.standbys))
